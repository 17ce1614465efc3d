"""Mistakes that a stranger types: where, what was found and a way out, never a traceback."""

import re
from pathlib import Path

import pytest

from holmesjax import job
from holmesjax.errors import HolmesError
from launch import verbs
from launch.__main__ import main
from launch.arguments import VERBS
from tests.jobs import write_run

LONG = "x" * 5000  # no file system takes it

# Arguments, with RUN and TOPOLOGY for files that are right; then what is said.
MISTAKES = [
    (f"plan {LONG}", LONG, "File name too long", "check the path"),
    (f"plan RUN topology={LONG}", LONG, "File name too long", "check the path"),
    (f"plan RUN run.dir={LONG}", "run.dir: cannot be looked at", "too long", "another run.dir"),
    (f"generate {LONG}", LONG, "File name too long", "check the path"),
    ("plan configs/runs/quickstrat.yaml", "no such file", "nothing there", "runs/quickstart.yaml?"),
    ("plan RUN topology=run_topolgy.yaml", "no such file", "topolgy", "did you mean run_topology"),
    ("plan RUN topology=ib_roce", "topology: no such file", "ib_roce,", "topologies/NAME.yaml"),
    (
        "plan org/model",
        "org/model: no such file",
        "nothing there",
        "do it so: hf download org/model",
    ),
    (
        "generate org/model",
        "org/model: is no run",
        "no config",
        "--local-dir models/model; then name",
    ),
    (
        "import org/model --to OUT",
        "org/model/config.json: cannot",
        "No such",
        "hf download org/model",
    ),
    (
        "export org/model --out OUT",
        "is no run folder",
        "no config",
        "launch import models/model --to",
    ),
    (
        *("tokenize org/set --tokenizer bytes --out OUT", "corpus: is not there", "org/set"),
        "hf download org/set --repo-type dataset --local-dir corpora/set; then name corpora/set",
    ),
    (
        *(
            "tokenize https://huggingface.co/datasets/org/set --tokenizer bytes --out OUT",
            "no store",
        ),
        *("https", "hf download org/set --repo-type dataset"),
    ),
    (
        *("tokenize configs --tokenizer org/model --out OUT", "--tokenizer: cannot be read"),
        *("org/model: No such", "hf download org/model --local-dir tokenizers/model"),
    ),
    (
        *("tokenize configs --tokenizer gpt2 --out OUT", "--tokenizer: cannot be read"),
        *("gpt2: No such", "or bytes; nothing is downloaded"),
    ),
    (
        *(
            "plan RUN parallel.tensor=3 model.num_heads=6 model.width=48 model.mlp_width=96",
            "must be a multiple of",
        ),
        *("256", "use 258, or change parallel.tensor"),
    ),
    ("plan TOPOLOGY", "TOPOLOGY: is a topology, not a run", "`clusters`", "configs/runs/"),
    ("plan RUN topology=RUN", "RUN: is a run, not a topology", "`model`", "configs/topologies/"),
    ("probe RUN", "RUN: is a run, not a topology", "`model`", "configs/topologies/"),
    ("doctor RUN run.dir=/proc/x", "run.dir: cannot be written", "/proc/x", "can be written"),
    ("doctor RUN --listen a:1", "--listen: is only for", "a:1", "add --launcher external"),
    ("probe TOPOLOGY --hosts H", "H: no such file", "nothing there", "check the path"),
    ("probe TOPOLOGY --output /proc/x/y", "--output: cannot be written", "/proc/x", "can be"),
    ("probe TOPOLOGY --output /tmp", "--output: cannot be written", "a folder", "name a file"),
    ("profile RUN --output /nope/x", "--output: cannot be written", "no folder /nope", "a file"),
    ("train RUN --submit", "--submit: is only for", "--submit", "add --launcher slurm"),
    ("train RUN --launcher external", "--listen: the launcher", "found: nothing", "10.0.0.1:7000"),
    (
        "plan RUN --train.steps=2",
        "plan: has no such option",
        "--train.steps=2",
        "train.steps=VALUE",
    ),
    ("plan RUN --seed 2", "plan: has no such option", "--seed 2", "train.seed=VALUE"),
    ("train RUN --hots H", "train: has no such option", "--hots H", "did you mean --hosts?"),
    ("train RUN --overrides a=1", "has no such option", "--overrides a=1", "--help lists"),
    ("compare X --plot", "compare: has no such option", "--plot", "--help lists the options"),
    ("import /tmp --to s3://b/x", "--to: is a URL", "s3://b/x", "launch gather"),
    ("export /tmp --out gs://b/x", "--out: is a URL", "gs://b/x", "launch gather"),
    ("tokenizer /tmp --vocab 300 --out /tmp/", "--out: is the corpus", "/tmp", "another folder"),
    ("tokenize /tmp --tokenizer bytes --out /tmp", "--out: is the corpus", "/tmp", "another"),
    ("tokenize /tmp --tokenizer bytes --out /tmp/a/b", "--out: is inside", "/tmp/a/b", "--pattern"),
    ("tokenize X --tokenizer bytes --out OUT", "corpus: is not there", "X", "name a folder"),
    ("tokenize X --tokenizer Y --out OUT", "--tokenizer: cannot be read", "Y: No such", "or bytes"),
    ("tokenizer configs --pattern *.c --vocab 300 --out OUT", "--pattern: no", "*.c", "or corpus"),
    ("lab TOPOLOGY train RUN", "lab: needs `--` before", "train", "write -- train"),
    ("plan RUN parallel={tensor:2}", "no such setting", "tensor:2", "a space behind the colon"),
    ("train RUN --launcher local --max-restarts -1", "--max-restarts: must be", "-1", "0 or more"),
    ("train", "train: needs a run", "nothing", "configs/runs/quickstart.yaml"),
    ("trian RUN", "launch: has no such verb", "trian", "did you mean train?"),
    ("lab TOPOLOGY -- trian RUN", "launch: has no such verb", "trian", "did you mean train?"),
    ("train RUN --launcher slrum", "--launcher: has no such choice", "slrum", "ssh, slurm, kub"),
    ("train RUN --max-restarts x", "--max-restarts: must be a whole number", "x", "-restarts N"),
    ("generate X --top-p", "--top-p: needs a value", "nothing", "write --top-p P"),
    ("generate X --top-p x", "--top-p: must be a number", "x", "write --top-p P"),
    ("generate X --chat=yes", "--chat: takes no value", "yes", "leave the value out"),
    ("train RUN --l X", "train: has several such options", "--l", "write --launcher or --listen"),
    ("tokenizer X", "tokenizer: needs --vocab and --out", "nothing", "add --vocab N (number of"),
    ("data", "data: needs run", "nothing", "add run (a file of configs/runs/"),
    ("generate X two words", "generate: has an argument too many", "two words", "quotes around"),
]


@pytest.mark.parametrize("arguments, where, found, fix", MISTAKES, ids=lambda text: text[:30])
def test_a_mistake_is_told_with_a_way_out(tmp_path, capsys, arguments, where, found, fix):
    run = write_run(tmp_path, {"a": (1,), "b": (1,)})
    paths = {"RUN": str(run), "TOPOLOGY": str(tmp_path / "run_topology.yaml")}
    paths["OUT"] = str(tmp_path / "out")

    def filled(text):
        for name, path in paths.items():
            text = text.replace(name, path)
        return text

    assert main([filled(argument) for argument in arguments.split()]) == 2
    said = capsys.readouterr().err
    lines = said[said.index("error: ") :].splitlines()
    assert len(lines) == 3
    assert filled(where) in lines[0]
    assert lines[1].startswith("  found: ")
    assert found in lines[1]
    assert lines[2].startswith("  fix: ")
    assert fix in lines[2]


def test_no_argument_prints_the_verbs(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "verbs:" in capsys.readouterr().err


def test_the_help_lists_every_module_of_the_verbs(capsys):
    modules = {path.stem for path in Path(verbs.__file__).parent.glob("[!_]*.py")}
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+)\s+(.+)$", capsys.readouterr().out, re.MULTILINE)
    assert dict(listed) == {name: verb.help for name, verb in VERBS.items()}
    assert VERBS.keys() == modules


def test_a_run_that_is_no_path_is_refused():
    with pytest.raises(HolmesError, match="the run: must be a path\n  found: None"):
        job.load(None)
