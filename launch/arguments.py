"""The arguments of every verb, with their help; a mistake in them is found without importing JAX.

A verb's module in `launch.verbs` may import JAX, so its arguments are described here.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from holmesjax.config import Config
from holmesjax.errors import ConfigError
from holmesjax.files import schema
from holmesjax.hugging_face.tensors import FAMILIES
from holmesjax.topology.fabrics import NETWORKS
from launch.launchers.table import LAUNCHERS

EXAMPLES = """\
Plan, train and sample: python -m launch <verb> ...

examples:
  python -m launch train configs/runs/quickstart.yaml                  # the run as it is written
  python -m launch train configs/runs/quickstart.yaml train.steps=20   # with an override
  python -m launch train runs/quickstart                               # resume it
  python -m launch train configs/runs/quickstart.yaml --launcher local # a process for every node
  python -m launch train RUN.yaml --launcher ssh --hosts HOSTS.yaml    # on other machines
  python -m launch plan configs/runs/quickstart.yaml --explain         # print the plan, and why
  python -m launch lab configs/topologies/ib_roce.yaml -- train configs/runs/quickstart.yaml
  python -m launch generate runs/quickstart --prompt "def "            # continue a text
  python -m launch probe configs/topologies/ib_roce.yaml               # measure the networks
  python -m launch profile configs/runs/quickstart.yaml                # measure a device
  python -m launch nics                                                # the NICs of this host
"""
COMMANDS_IN_LAB = ("train", "plan", "doctor", "probe", "profile")
# The end of a message of argparse about one option, with what was found, and our problem.
PROBLEMS = {
    r"invalid choice: (.*) \(choose from .*": "has no such choice",
    r"invalid int value: (.*)": "must be a whole number",
    r"invalid float value: (.*)": "must be a number",
    r"expected one argument()": "needs a value",
    r"ignored explicit argument (.*)": "takes no value",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. Prints help and exits if help is asked for, or if nothing is.

    Returns:
        The arguments of the verb, and `verb`. For `lab` also `command`: the arguments of the
        command behind `--`, on the lab's topology; None for `lab clean`.

    Raises:
        ConfigError: the command line has a mistake.
    """
    parser, parsers = _make_parsers()
    if not argv:
        parser.print_help(sys.stderr)
        sys.exit(2)
    words, command = list(argv), None
    if words[0] == "lab" and "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    if words[0] in ("-h", "--help"):
        parser.print_help()
        sys.exit(0)
    if words[0] not in parsers:
        raise _unknown_verb(words[0], parsers)
    # argparse mixes the options of a verb with its overrides only in this method.
    verb = argparse.Namespace(verb=words[0])
    args, unknown = parsers[words[0]].parse_known_intermixed_args(words[1:], verb)
    if unknown:
        raise _unknown_option(parsers[args.verb], args, unknown)
    _refuse_no_text(parsers[args.verb], args)
    if getattr(args, "target", "") is None:  # argparse would ask for overrides, too
        fix = "add a run file, such as configs/runs/quickstart.yaml, or a run folder"
        raise ConfigError(args.verb, "needs a run", found="nothing", fix=fix)
    if args.verb == "plan" and args.topology:
        args.overrides.append(f"topology={args.topology}")
    if args.verb == "lab":
        args.command = _command_in_lab(args.topology, command)
    return args


def _refuse_no_text(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raises ConfigError for bytes of the command line that are no text in the shell's encoding."""
    for name, value in vars(args).items():
        for word in value if isinstance(value, list) else [value]:
            try:
                str(word).encode()
            except UnicodeEncodeError:
                option = f"--{name.replace('_', '-')}"
                where = option if option in parser._option_string_actions else args.verb
                problem = f"has what is no text in {sys.getfilesystemencoding()}"
                fix = "type it again, where the shell is set to UTF-8: export LC_ALL=C.UTF-8"
                raise ConfigError(where, problem, found=ascii(word), fix=fix) from None


class _Parser(argparse.ArgumentParser):
    """A parser that raises a ConfigError for a mistake, in place of printing its usage."""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help; unlike argparse, it does not hide that it cannot."""
        print(message, end="", file=file or sys.stderr, flush=True)

    def error(self, message: str) -> NoReturn:
        """Raises the mistake that a message of argparse describes."""
        about, _, said = message.partition(": ")
        verb, words = self.prog.split()[-1], said.replace(", ", " ").split()
        if option := self._option_string_actions.get(about.removeprefix("argument ")):
            for pattern, problem in PROBLEMS.items():
                if match := re.fullmatch(pattern, said, re.DOTALL):
                    fix = "leave the value out" if option.nargs == 0 else f"write {_shown(option)}"
                    found = match[1].strip("'") or "nothing"
                    raise ConfigError(option.option_strings[-1], problem, found=found, fix=fix)
        if about == "the following arguments are required":
            missing = {_name(a): a for a in self._actions if _name(a) in words and a.nargs != "*"}
            fix = "add " + ", and ".join(f"{_shown(a)} ({a.help})" for a in missing.values())
            raise ConfigError(verb, f"needs {' and '.join(missing)}", found="nothing", fix=fix)
        if about == "ambiguous option":
            fix = f"write {' or '.join(words[3:])}"
            raise ConfigError(verb, "has several such options", found=words[0], fix=fix)
        fix = f"{self.prog} --help lists the options"
        raise ConfigError(verb, "cannot be understood", found=message, fix=fix)


def _name(action: argparse.Action) -> str:
    """Returns the name of an argument in the messages of argparse."""
    options = action.option_strings
    return options[-1] if options else str(action.metavar or action.dest)


def _shown(action: argparse.Action) -> str:
    """Returns an argument as a user writes it: `--vocab N`, `--launcher ssh or slurm`, `corpus`."""
    if not action.option_strings:
        return _name(action)
    *first, last = map(str, action.choices or (action.metavar or action.dest.upper(),))
    return f"{_name(action)} {', '.join(first)}{' or ' * bool(first)}{last}"


def _make_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Makes the parser of the command line, and that of each verb."""
    parser = _Parser(
        "python -m launch",
        description=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="python -m launch VERB --help lists the options of a verb",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for name, verb in VERBS.items():
        verb.add_to(verbs.add_parser(name, help=verb.help, description=verb.help))
    return parser, verbs.choices


def _unknown_verb(word: str, verbs: Mapping[str, Any]) -> ConfigError:
    """Makes the error of a first word that is no verb."""
    close = difflib.get_close_matches(word, verbs, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    fix = f"{meant}python -m launch --help lists the verbs"
    return ConfigError("launch", "has no such verb", found=word, fix=fix)


def _unknown_option(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str]
) -> ConfigError:
    """Makes the error of words for which the verb of a parser has no place."""
    found = " ".join(words)
    if args.verb == "lab" and words[0] in COMMANDS_IN_LAB:
        fix = f"write -- {found}"
        return ConfigError("lab", "needs `--` before its command", found=found, fix=fix)
    option = next((word for word in words if word.startswith("-")), "").partition("=")[0]
    if not option:
        fix = "leave it out, or put quotes around a text of several words"
        return ConfigError(args.verb, "has an argument too many", found=found, fix=fix)
    options = parser._option_string_actions
    if close := difflib.get_close_matches(option, options, n=1, cutoff=0.8):
        fix = f"did you mean {close[0]}?"
    else:
        fix = f"{parser.prog} --help lists the options"
        if "overrides" in args:
            name = option.lstrip("-")
            homes = schema.sections_with(Config, name)
            settings = " or ".join(f"{section}.{name}" for section in homes) or name
            fix += f"; a setting has no dashes: {settings}=VALUE"
    return ConfigError(args.verb, "has no such option", found=found, fix=fix)


def _command_in_lab(topology: str, argv: Sequence[str] | None) -> argparse.Namespace | None:
    """Parses what follows `--`, and puts it on the lab's topology; None for `lab clean`."""
    if topology == "clean":
        return None
    if not argv:
        raise ConfigError("lab", "needs a command", found="nothing", fix="add -- train RUN.yaml")
    command = parse(argv)
    if command.verb not in COMMANDS_IN_LAB:
        problem = "cannot run this verb, which has no topology"
        fix = "use train, plan, doctor, probe or profile"
        raise ConfigError("lab", problem, found=command.verb, fix=fix)
    if command.verb == "probe":
        if command.topology is not None:
            problem, fix = "the lab has its own topology", "name the topology behind lab only"
            raise ConfigError("probe", problem, found=command.topology, fix=fix)
        command.topology = topology
        return command
    for override in command.overrides:
        if override.startswith("topology="):
            fix = "name the topology behind lab only"
            raise ConfigError(override, "the lab has its own topology", found=override, fix=fix)
    command.overrides.append(f"topology={topology}")
    if command.verb == "train":
        command.overrides.append("run.rehearse=true")
    return command


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    add = parser.add_argument
    add("--launcher", choices=tuple(LAUNCHERS), help="how a process starts on every node")
    add("--listen", metavar="HOST:PORT", help="address of this machine for the processes")
    limit = "restarts without a new step (0; 3 if a scheduler restarts the job)"
    add("--max-restarts", type=int, metavar="N", help=limit)
    what = "what may differ: settings from the checkpoint's, or facts between processes: "
    what += "train.seed,source"
    add("--allow", action="append", default=[], metavar="NAMES", help=what)
    add("--hosts", metavar="YAML", help="ssh: how each node is reached, and its run folder")
    add(
        "--options",
        metavar="YAML",
        help="slurm, kubernetes, skypilot, ray: partition, image and the like",
    )
    add("--submit", action="store_true", help="slurm: submit the file that is written")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    add = parser.add_argument
    add("--topology", metavar="YAML", help="a topology file in place of the run's")
    add("--explain", action="store_true", help="print what limits the plan, and what would help")
    what_if = "plan again with a changed topology: links.ib<->roce.bandwidth='100 Gb/s'"
    add("--what-if", action="append", default=[], metavar="key=value", help=what_if)
    add("--trace", metavar="JSON", help="write the simulated step for ui.perfetto.dev")
    add("--json", action="store_true", help="print JSON, for programs")


def _add_lab(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m launch lab TOPOLOGY [options] -- train RUN ... | lab clean"
    add = parser.add_argument
    add("topology", help="a topology file; or `clean`: take away what crashed labs have left")
    add("--cpu", metavar="SHARE", help="share of a core for the fastest node: 45%% (all there is)")
    add("--scale", type=float, metavar="F", help="factor of all rates (the factor of compute)")
    add("--real", metavar="RUN", help="run whose bytes per FLOP are kept (the same run)")
    add(
        "--fault",
        action="append",
        default=[],
        help="a fault: 'step=20 cut ib<->roce 10s'; repeatable",
    )
    add("--dry-run", action="store_true", help="print every command and run none")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="a run folder, or a folder of Hugging Face's format")
    add("--prompt", action="append", metavar="TEXT", help="text to continue; repeatable")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens to add (256)")
    temperature = "0 takes the likeliest token (0.8)"
    add("--temperature", type=float, default=0.8, metavar="T", help=temperature)
    top_k = "sample from the K likeliest tokens; 0: from all (0)"
    add("--top-k", type=int, default=0, metavar="K", help=top_k)
    top_p = "sample from the likeliest tokens whose probabilities add up to P (1.0)"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    min_p = "sample from tokens with at least P times the likeliest one's probability (0.0)"
    add("--min-p", type=float, default=0.0, metavar="P", help=min_p)
    seed = "seed of the samples; each further prompt has the next seed (0)"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    stop = "end a text before this string; repeatable"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add(
        "--chat",
        action="store_true",
        help="put each prompt into the chat template, as a user's words",
    )
    add("--messages", metavar="JSON", help="a file with a dialogue to continue, as --chat does")
    variables = "an object with more variables for the chat template, beside those of the run"
    add("--chat-template-kwargs", metavar="JSON", help=variables)
    planned = "cut the model into the stages of the run's plan, on devices of this host"
    add("--as-planned", action="store_true", help=planned)
    add("--ema", action="store_true", help="take the average of the weights (optimizer.ema_decay)")
    add("--json", action="store_true", help="print a line of JSON for each text, for programs")
    agents = [name for name, kind in LAUNCHERS.items() if not kind.needs_job]
    started = "how the processes of the run's plan start, which share the model"
    add("--launcher", choices=agents, help=started)
    add("--listen", metavar="HOST:PORT", help="address of this machine for the processes")
    add("--hosts", metavar="YAML", help="ssh: how each node is reached")
    add("--options", metavar="YAML", help="ray: what the nodes have")
    several = "cut the model over N devices of this host"
    add("--devices", type=int, metavar="N", help=several)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", help="a folder, file or dataset of documents, s3://..., or python-stdlib")
    add("--pattern", metavar="GLOB", help="files of the folder (every text file not hidden)")
    add("--column", default="text", metavar="NAME", help="the field or column of documents (text)")
    add("--vocab", type=int, required=True, metavar="N", help="number of tokens, such as 4096")
    add("--out", required=True, metavar="PATH", help="a file .json, or a folder")


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", help="a folder, file or dataset of documents, s3://..., or python-stdlib")
    add("--pattern", metavar="GLOB", help="files of the folder (every text file not hidden)")
    add("--tokenizer", required=True, metavar="T", help="a tokenizer's folder or file, or bytes")
    add("--out", required=True, metavar="DIR", help="the folder of the files of tokens")
    column = "the field or column of documents: of text, or of lists of tokens (text)"
    add("--column", default="text", metavar="NAME", help=column)
    numbers = "type of the tokens in array_record files; without it, records are text"
    add("--dtype", choices=("uint16", "uint32", "int32", "int64"), help=numbers)
    add("--workers", type=int, metavar="N", help="processes (one for each core)")
    size = "bytes of the corpus in a shard (268435456)"
    add("--shard-bytes", type=int, default=2**28, metavar="N", help=size)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", help="a file of configs/runs/, a run folder, or a corpus by itself")
    add("overrides", nargs="*", metavar="key=value", help="settings, dotted: train.seed=1")
    add("--windows", type=int, default=2, metavar="N", help="windows of the first step to show (2)")
    column = "of a corpus by itself: the field or column of its documents (text)"
    add("--column", default="text", metavar="NAME", help=column)
    add("--verify", action="store_true", help="read all tokens, and compare the files' hashes")


def _add_import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("hf_dir", help="a folder with config.json and safetensors")
    add("--to", metavar="RUN_DIR", required=True, help="the run folder, a new one")
    add("--run", metavar="YAML", help="run file with the settings besides the model (defaults)")
    add("overrides", nargs="*", metavar="key=value", help="settings, dotted: train.steps=20")


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="a run folder")
    formats = "hf: Hugging Face's; peft: adapters alone (hf)"
    add("--format", choices=("hf", "peft"), default="hf", help=formats)
    add("--merge", action="store_true", help="add the adapters of model.lora to the weights")
    add("--out", metavar="DIR", required=True, help="the folder that is written, a new one")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights (as imported, or float32)",
    )
    add("--ema", action="store_true", help="write the average of the weights (optimizer.ema_decay)")
    add("--step", type=int, metavar="N", help="step of the checkpoint (the newest)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a file (5GB)")
    families = "family of the config.json (as imported, or the first that has such models)"
    add("--family", choices=tuple(FAMILIES), metavar="NAME", help=families)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="run folders")
    add("--out", metavar="FILE", help="draw the losses into a file .png, .svg or .pdf")


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="folder of a run that trains or has ended")
    parser.add_argument("--once", action="store_true", help="print it once, and end")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="folder of a run that trains or has ended")


def _add_nics(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--fabric",
        choices=tuple(NETWORKS),
        help="fabric of the variables to print (all of this host)",
    )
    add("--json", action="store_true", help="print JSON, for programs")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    _add_agents(parser)


def _add_probe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("topology", nargs="?", help="a topology file; left out inside a lab")
    add("--output", metavar="YAML", help="the file that is written (the topology file itself)")
    add("--no-collectives", action="store_true", help="measure TCP only, without JAX")
    _add_agents(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    add = parser.add_argument
    add("--node", metavar="NAME", help="this host's name in the topology (any, if all are equal)")
    add("--output", metavar="YAML", help="the file that is written (KIND.yaml)")


def _add_worker(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="the folder of the job's run")
    add(
        "--generates", action="store_true", help="generate text for prompts that the launcher sends"
    )


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a run folder of this machine")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="the folder of a run")
    parser.add_argument("--step", type=int, metavar="N", help="one checkpoint (all)")


def _add_gather(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="the folder of a run")
    add("--to", required=True, metavar="DIR_OR_URL", help="where the checkpoint goes: s3://b/x")
    add("--step", type=int, metavar="N", help="after which step (the newest)")
    _add_agents(parser)


def _add_relay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--key-file", required=True, metavar="FILE", help="with the key of the relay")
    add("--listen", metavar="HOST:PORT", help="where processes call it: 0.0.0.0:7443")
    made = "the key of the job: writes that of the relay, which follows from it, and ends"
    add("--make-key", metavar="FILE", help=made)


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments: an agent reads its environment."""


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the run and its overrides."""
    parser.add_argument("target", nargs="?", help="a file of configs/runs/, or a run folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, dotted: train.steps=20"
    )


def _add_agents(parser: argparse.ArgumentParser) -> None:
    """Adds how the nodes are reached."""
    agents = [name for name, kind in LAUNCHERS.items() if not kind.needs_job]
    add = parser.add_argument
    add("--launcher", choices=agents, help="how nodes are reached (local)")
    add("--listen", metavar="HOST:PORT", help="address of this machine for the nodes")
    add("--hosts", metavar="YAML", help="ssh: how each node is reached")
    add("--options", metavar="YAML", help="ray: what the nodes have")


class Verb(NamedTuple):
    """A verb of the command line; `launch.verbs` has a module of its name."""

    help: str
    add_to: Callable[[argparse.ArgumentParser], Any]  # adds its arguments to a parser


VERBS = {
    "train": Verb("start a run, or resume one from its folder", _add_train),
    "plan": Verb("print the plan of a run and start nothing", _add_plan),
    "lab": Verb("rehearse on a topology rebuilt out of network namespaces", _add_lab),
    "generate": Verb("continue texts with a run's newest checkpoint", _add_generate),
    "tokenizer": Verb("train a byte-level BPE tokenizer on a corpus", _add_tokenizer),
    "tokenize": Verb("turn text into files of tokens, which runs read", _add_tokenize),
    "data": Verb("show what data a run would read", _add_data),
    "import": Verb("begin a run with the weights of a Hugging Face folder", _add_import),
    "export": Verb("write a run's model as a Hugging Face folder", _add_export),
    "verify": Verb("read a run's checkpoints, and compare them with their manifests", _add_verify),
    "gather": Verb("make one checkpoint of parts that are in several places", _add_gather),
    "top": Verb("show a run as it trains: its loss, stages, links and time left", _add_top),
    "report": Verb("write report.html of a run, as far as the run has come", _add_report),
    "compare": Verb("show runs side by side: losses, costs and settings", _add_compare),
    "nics": Verb("print this host's NICs, and what NCCL is told of them", _add_nics),
    "doctor": Verb("check everything that a start needs, on all nodes", _add_doctor),
    "probe": Verb("measure the networks of a topology, and write them into its file", _add_probe),
    "profile": Verb("measure a device, so that the planner knows its speed", _add_profile),
    "agent": Verb("answer what doctor and probe ask of a node (they start it)", _add_nothing),
    "store": Verb("let a job read the parts of checkpoints that are here", _add_store),
    "relay": Verb("join processes of a job that cannot call each other", _add_relay),
    "worker": Verb("be one process of a job (for launchers)", _add_worker),
}
