"""Every command and all Python that the pages show run here, or in a test that is named here.

The words of the pages are run as they stand there, in a folder where the files that they name are
small. A command counts as run where one with the same verb and options is; values may differ.
"""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from holmesjax.config import CHECKOUT
from tests.hugging_face.model_folders import write_folder
from tests.jobs import run_launch_here
from tests.pages import PAGES

RUN = """
topology: configs/topologies/ib_roce.yaml
run: {{dir: runs/{name}, rehearse: true}}
model: {{num_layers: 2, width: 16, num_heads: 2, context_length: 16, vocab_size: 512}}
data: {data}
train: {{steps: 2, global_batch: 4, log_every_s: 0, eval_batches: 1}}
log: {{report: false, tensorboard: false}}
optimizer: {{learning_rate: 3.0e-3}}
parallel: {{{parallel}}}
"""
PIPELINE = "stages: 2, microbatches: 2, schedule: 1f1b"
ISLANDS = "across: local_updates, every: 2"
TEXT = "{corpus: texts, validation_fraction: 0.2}"
TOKENS = "{source: tokens, corpus: tokens.npy, tokenizer: tokenizers/web, validation_fraction: 0.2}"
RUNS = {
    "configs/runs/quickstart": TEXT,
    "configs/runs/small_llama": TOKENS,
    "configs/runs/llama3_1_8b": TEXT,
    "configs/runs/islands": TEXT,
    "configs/runs/small_experts": TEXT,
    "RUN": TOKENS,
}
TWO_CLUSTERS = (CHECKOUT / "configs/topologies/two_cpus.yaml").read_text()
TOPOLOGIES = {
    "configs/topologies/ib_roce": TWO_CLUSTERS,
    "configs/topologies/one_node": (CHECKOUT / "configs/topologies/one_cpu.yaml").read_text(),
    "ours": TWO_CLUSTERS,
    "OTHER": TWO_CLUSTERS,
}
# Files that a page shows, and the names that commands have for them.
OPTIONS = {
    "docs/slurm.md": ("SLURM.yaml", "slurm.yaml"),
    "docs/kubernetes.md": ("K8S.yaml", "k8s.yaml"),
    "docs/skypilot.md": ("SKYPILOT.yaml",),
}

JOB = "distributed/test_whole_jobs.py::test_the_steps_are_those_of_one_device"
EXTERNAL = (
    "distributed/test_whole_jobs.py::"
    "test_all_processes_of_a_stage_keep_to_the_schedule_whatever_comes_late"
)
SSH = "launch/test_ssh.py::test_a_job_over_ssh_survives_the_death_of_a_process"
SSH_AGENTS = "launch/test_ssh.py::test_the_doctor_goes_over_ssh"
EXTERNAL_AGENTS = "hosts/test_probe.py::test_addresses_that_cannot_be_are_told_of"
RAY = "launch/test_ray.py::test_processes_start_on_their_nodes_and_their_words_and_ends_are_told"
PROCESSES = (
    "generation/test_sampler.py::test_a_run_is_sampled_on_one_device_as_planned_and_by_processes"
)
LAB = (
    "lab/test_lab_network.py::test_a_job_is_the_same_in_a_lab_and_its_bytes_are_those_of_the_kernel"
)
PROFILE = "runtime/test_device_profile.py::test_a_device_is_measured_and_the_planner_takes_it"
PROBE_IN_LAB = "hosts/test_probe.py::test_the_rates_of_a_lab_are_found_again"
# What needs processes, a lab or other programs, and the tests where it runs. Generation and probes
# over SSH start their processes as jobs and the doctor do.
ELSEWHERE = {
    "train --launcher local": JOB,
    "train --launcher external": EXTERNAL,
    "train --listen": EXTERNAL,
    "train --launcher ssh": SSH,
    "train --hosts": SSH,
    "train --launcher ray": RAY,
    "doctor --launcher ray": RAY,
    "doctor --options": RAY,
    "train --max-restarts": SSH,
    "train --submit": "launch/test_slurm.py::test_a_heterogeneous_job_is_restarted_and_requeued",
    "generate --launcher ssh": PROCESSES,
    "generate --hosts": SSH_AGENTS,
    "doctor FILE": "hosts/test_doctor.py::test_nodes_of_this_machine_are_well",
    "doctor --launcher ssh": SSH_AGENTS,
    "doctor --hosts": SSH_AGENTS,
    "doctor --launcher external": EXTERNAL_AGENTS,
    "doctor --listen": EXTERNAL_AGENTS,
    "probe FILE": PROBE_IN_LAB,
    "probe --launcher ssh": SSH_AGENTS,
    "probe --hosts": SSH_AGENTS,
    "lab -- train": LAB,
    "lab -- probe": PROBE_IN_LAB,
    "lab --fault": LAB,
    "lab --scale": LAB,
    "lab clean": "lab/test_lab_network.py::test_nothing_is_left_whatever_ends_a_lab",
    "profile FILE": PROFILE,
    "profile --output": PROFILE,
    "nics --fabric infiniband": "hosts/test_nccl.py::test_the_verb_on_this_machine",
    "tokenize STORE": "data/test_object_stores.py::test_a_format_is_read_in_a_store_as_it_is_here",
}
CHOICES = ("--launcher", "--format", "--fabric")  # each value is as an option of its own
# Lines that are no command of ours, by how they begin.
OTHERS = {
    "make test": "runs this test",
    "make help": "test_documents.py::test_make_help_has_a_sentence_for_every_target",
    "pip": "installs or downloads packages",
    "python3 -m venv": "makes an environment",
    ".venv/bin/python -m pip": "installs packages",
    ".venv/bin/pytest": "runs tests",
    "git diff": "shows what changed",
    "export": "sets variables of a shell",
    "python -m benchmarks.": "takes minutes to hours",
}
# Python that needs more than a run, and the tests that run it.
PYTHON_ELSEWHERE = {
    "docs/api.md": "test_documents.py",
    "docs/checkpoints.md": "checkpoints/test_restoring.py",
    "docs/extending.md": "toys/test_page.py",
    "docs/extending_models.md": "models/test_added_family.py",
    "docs/extending_training.md": "data/test_random_access.py",
    "docs/your_own_": "test_your_own_model.py",
}


def commands_of(page):
    """The lines of the commands on a page, without comments, each as its words."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def launched(words):
    """The words behind `-m launch`; None, if a line is no such command."""
    if words == ["make", "train"]:
        recipe = re.search(
            r"^train: .*\n\t(.*)$", (CHECKOUT / "Makefile").read_text(), re.MULTILINE
        )
        words = recipe[1].split()
    return words[words.index("launch") + 1 :] if words[1:3] == ["-m", "launch"] else None


def shown_by(words):
    """The verb of a command with the kind of its target, and with each of its options."""
    verb, *rest = words
    if verb == "lab" and "--" in rest:
        at = rest.index("--")
        rest, inner = rest[:at], rest[at + 1]
        if "--dry-run" not in rest:
            yield f"lab -- {inner}"
    kinds = {"clean": "clean", "yaml": "FILE"}
    for i, word in enumerate(rest):
        option, _, value = word.partition("=")
        if option in CHOICES:
            yield f"{verb} {option} {value or rest[i + 1]}"
        elif option.startswith("--"):
            yield f"{verb} {option}"
        elif i == 0:
            kind = "STORE" if "://" in word else kinds.get(word.rpartition(".")[2], "FOLDER")
            yield f"{verb} {kind}"


def picked(commands, run):
    """The commands that show what was not run, and those that make what these commands name."""
    known, picks, named = set(run), [], ""
    for words in commands:
        new = {*shown_by(words)} - known
        known |= new
        picks.append(bool(new))
    for i, text in reversed([*enumerate(map(" ".join, commands))]):
        made = re.search(r"(?:run\.dir=|--out |--to )(\S+)", text)
        picks[i] |= made is not None and made[1] in named
        named += text * picks[i]
    return [words for words, is_picked in zip(commands, picks, strict=True) if is_picked]


def quick(text):
    """Makes runs short: those of a hundred steps and more go on by a few."""
    text = re.sub(r"(context_length=)\d+", r"\g<1>32", text)
    return re.sub(r"(train\.steps\W+)(\d+)", lambda own: f"{own[1]}{2 + int(own[2]) // 100}", text)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """The folder in which the commands run, with the files that they name."""
    for name, data in RUNS.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        parallel = ISLANDS if path.stem == "islands" else PIPELINE
        path.write_text(RUN.format(name=path.stem, data=data, parallel=parallel))
    for name, topology in TOPOLOGIES.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(topology)
    for page, names in OPTIONS.items():
        shown = re.search(r"```yaml\n(.*?)```", (CHECKOUT / page).read_text(), re.DOTALL)[1]
        for name in names:
            (tmp_path / name).write_text(shown)
    for name in ("texts", "path/to/texts", "corpora/mine", "corpora/web"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(8):
            text = f"def function_{i}(x):\n    return x + {i}\n" * 100
            (tmp_path / name / f"{i}.txt").write_text(text)
    token_T = np.arange(4000) % 250
    np.save(tmp_path / "tokens.npy", token_T)
    (tmp_path / "nanogpt").mkdir()
    token_T.astype(np.uint16).tofile(tmp_path / "nanogpt/train.bin")
    (tmp_path / "web/train").mkdir(parents=True)
    line = f'{{"input_ids": {token_T.tolist()}}}\n'
    (tmp_path / "web/train/0.jsonl").write_text(line)
    write_folder(tmp_path / "Qwen3-0.6B", "qwen3", 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_command_is_run(world, capsys, is_whole):
    """Each page is run as far as it shows something new, or whole, which takes longer."""
    words = ["tokenizer", "corpora/web", "--vocab", "300", "--out", "tokenizers/web"]
    assert run_launch_here(capsys, *words, cwd=world).returncode == 0
    shutil.copytree("tokenizers/web", "tokenizers/gpt2")
    run, shown = set(), set()
    first = [CHECKOUT / "README.md", CHECKOUT / "docs/tutorial.md"]
    for page in [*first, *(page for page in PAGES if page not in first)]:
        commands = [words for line in commands_of(page) if (words := launched(line))]
        shown |= {name for words in commands for name in shown_by(words)}
        here = [words for words in commands if not ELSEWHERE.keys() & {*shown_by(words)}]
        for words in here if is_whole else picked(here, run):
            done = run_launch_here(capsys, *map(quick, words), cwd=world)
            assert done.returncode == 0, f"{page.name}: {words}\n{done.stderr}"
        run |= {name for words in here for name in shown_by(words)}
        name = str(page.relative_to(CHECKOUT))
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            if not name.startswith(tuple(PYTHON_ELSEWHERE)):
                exec(quick(block), {})
    assert not shown - run - ELSEWHERE.keys(), "a page shows what runs nowhere"
    assert not ELSEWHERE.keys() - (shown - run), "these run here, or are shown no more"


def test_tests_that_run_what_is_not_run_here_are_there():
    for place in {*ELSEWHERE.values()}:
        file, name = place.split("::")
        assert f"\ndef {name}(" in (CHECKOUT / "tests" / file).read_text(), place
    for page, file in PYTHON_ELSEWHERE.items():
        assert page in (CHECKOUT / "tests" / file).read_text(), page


def test_lines_that_are_no_command_of_ours_are_known():
    for words in (words for page in PAGES for words in commands_of(page)):
        if launched(words) is None:
            assert " ".join(words).startswith(tuple(OTHERS)), words
        if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
            source = Path(CHECKOUT, *words[2].split(".")).with_suffix(".py").read_text()
            options = [word for word in words if word.startswith("--") and word != "--help"]
            assert not [option for option in options if f'"{option}"' not in source], words
