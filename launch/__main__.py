"""Plan, train and sample: python -m launch <verb> ...

examples:
  python -m launch train configs/runs/quickstart.yaml                  # the run as it is written
  python -m launch train configs/runs/quickstart.yaml train.steps=20   # with an override
  python -m launch train runs/quickstart                               # resume it
  python -m launch train configs/runs/quickstart.yaml --launcher local # a process for every node
  python -m launch train RUN.yaml --launcher ssh --hosts HOSTS.yaml    # on other machines
  python -m launch plan configs/runs/quickstart.yaml --explain         # print the plan, and why it
  python -m launch lab configs/topologies/ib_roce.yaml -- train configs/runs/quickstart.yaml
  python -m launch generate runs/quickstart --prompt "def "            # sample from it
  python -m launch probe configs/topologies/ib_roce.yaml               # measure its networks
  python -m launch profile configs/runs/quickstart.yaml                # measure a device
  python -m launch nics                                                # what this host has
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from holmesjax.errors import REQUEUE, ConfigError, HolmesError
from launch.patience import Patience

VERBS = {
    "train": "start a run, or resume one from its folder",
    "plan": "print the plan of a run and start nothing",
    "lab": "rehearse on a topology rebuilt out of network namespaces",
    "generate": "sample text from a run's newest checkpoint",
    "nics": "print this host's NICs, and what NCCL is told of them",
    "doctor": "look at everything that a start needs, on all nodes",
    "probe": "measure the networks of a topology, and write them into its file",
    "profile": "measure a device, for the planner to know what it reaches",
    "agent": "answer what doctor and probe ask of a node (they start it)",
    "worker": "be one process of a job (for launchers)",
}
LAUNCHERS = ("local", "external", "ssh", "slurm", "kubernetes")


def verb_parser(verb: str) -> argparse.ArgumentParser:
    """The arguments of one verb; here, so that they can be checked without importing JAX."""
    parser = argparse.ArgumentParser(f"python -m launch {verb}", description=VERBS[verb])
    if verb == "generate":
        add = parser.add_argument
        add("run_dir", help="a run folder")
        add("--prompt", default="", help="text to continue")
        add("--max-tokens", type=int, default=256, help="tokens to add (256)")
        add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
        add("--top-k", type=int, default=0, help="only of the k likeliest; 0: of all (0)")
        add("--top-p", type=float, default=1.0, help="only of the likeliest share (1.0)")
        add("--seed", type=int, default=0, help="of the samples (0)")
        return parser
    if verb == "nics":
        add = parser.add_argument
        add("--fabric", choices=["infiniband", "roce", "ethernet"], help="of its cluster (any)")
        add("--json", action="store_true", help="for programs")
        return parser
    if verb == "agent":
        return parser
    if verb == "worker":
        parser.add_argument("run_dir", help="the folder of the job's run")
        return parser
    if verb == "lab":
        add = parser.add_argument
        parser.usage = "python -m launch lab TOPOLOGY [options] -- train RUN ... | lab clean"
        add("topology", help="a topology file; or `clean`: take away what crashed labs have left")
        add("--cpu", metavar="SHARE", help="of a core, for the fastest node: 45%% (all there is)")
        add("--scale", type=float, metavar="F", help="of all rates (as compute is slower here)")
        add("--real", metavar="RUN", help="the run whose bytes per FLOP are kept (the same run)")
        add("--fault", action="append", default=[], help="'step=20 cut ib<->roce 10s'; repeatable")
        add("--dry-run", action="store_true", help="print every command and run none")
        return parser
    if verb == "probe":
        add = parser.add_argument
        add("topology", nargs="?", help="a topology file; inside a lab, it is the lab's")
        add("--output", metavar="YAML", help="the file that is written (the topology file itself)")
        add("--no-collectives", action="store_true", help="measure TCP only, without JAX")
        _add_agents_options(parser)
        return parser
    parser.add_argument("target", nargs="?", help="a file of configs/runs/, or a run folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted if nested")
    if verb == "doctor":
        _add_agents_options(parser)
    elif verb == "plan":
        add = parser.add_argument
        add("--topology", metavar="YAML", help="in place of the run's")
        add("--explain", action="store_true", help="what binds the plan, and what would help")
        what_if = "plan again with a changed topology: links.ib<->roce.bandwidth='100 Gb/s'"
        add("--what-if", action="append", default=[], metavar="key=value", help=what_if)
        add("--trace", metavar="JSON", help="write the simulated step, for ui.perfetto.dev")
        add("--json", action="store_true", help="for programs")
    elif verb == "profile":
        add = parser.add_argument
        add("--node", metavar="NAME", help="of the topology, that this host is (any, if all alike)")
        add("--output", metavar="YAML", help="the file that is written (KIND.yaml)")
    else:
        add = parser.add_argument
        add("--launcher", choices=LAUNCHERS, help="who starts a process for every node")
        add("--listen", metavar="HOST:PORT", help="where the processes find this one")
        limit = "restarts without a new step (0; where a scheduler restarts it, 3)"
        add("--max-restarts", type=int, metavar="N", help=limit)
        what = "of settings that may differ from the checkpoint's: train.seed,data.corpus"
        add("--allow", action="append", default=[], metavar="NAMES", help=what)
        add("--hosts", metavar="YAML", help="ssh: how each node is reached")
        add("--options", metavar="YAML", help="slurm, kubernetes: partition, image and the like")
        add("--submit", action="store_true", help="slurm: submit the file that is written")
    return parser


def _add_agents_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = ("local", "external", "ssh")
    add("--launcher", choices=names, help="how nodes are reached (local)")
    add("--listen", metavar="HOST:PORT", help="where the nodes find this machine")
    add("--hosts", metavar="YAML", help="ssh: how each node is reached")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items())
    parser = argparse.ArgumentParser(
        "python -m launch", description=f"{__doc__}\nverbs:\n{verbs}", formatter_class=raw
    )
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see <verb> --help")
    argv, inner = list(argv), None
    if not argv:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if argv[:1] == ["lab"] and "--" in argv:
        inner = argv[argv.index("--") + 1 :]
        argv = argv[: argv.index("--")]
    top = parser.parse_args(argv)
    args = verb_parser(top.verb).parse_intermixed_args(top.arguments)
    args.verb = top.verb
    if getattr(args, "target", "") is None:  # argparse would ask for overrides, too
        verb_parser(top.verb).error("a run file is missing, or a run folder")
    if top.verb == "plan" and args.topology:
        args.overrides.append(f"topology={args.topology}")
    if top.verb == "lab":
        args.command = _command_in_lab(args, inner)
    return args


def _command_in_lab(
    args: argparse.Namespace, argv: Sequence[str] | None
) -> argparse.Namespace | None:
    """What follows `--`, on the lab's topology; None for `lab clean`."""
    if args.topology == "clean":
        return None
    if not argv:
        raise ConfigError("lab", "needs a command", found="nothing", fix="add -- train RUN.yaml")
    command = parse(argv)
    if command.verb not in ("train", "plan", "doctor", "probe", "profile"):
        problem = "has no topology that a lab could stand for"
        fix = "use train, plan, doctor, probe or profile"
        raise ConfigError("lab", problem, found=command.verb, fix=fix)
    if command.verb == "probe":
        if command.topology is not None:
            problem, fix = "the lab has its own topology", "name the topology behind lab only"
            raise ConfigError("probe", problem, found=command.topology, fix=fix)
        command.topology = args.topology
        return command
    for override in command.overrides:
        if override.startswith("topology="):
            fix = "name the topology behind lab only"
            raise ConfigError(override, "the lab has its own topology", found=override, fix=fix)
    command.overrides.append(f"topology={args.topology}")
    if command.verb == "train":
        command.overrides.append("run.rehearse=true")
    return command


def _reads_data(args: argparse.Namespace) -> bool:
    """Whether the run would read its data on this machine; `plan` shows what `train` would do."""
    return args.verb == "plan" or (args.verb == "train" and args.launcher in (None, "local"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 cannot go on, 2 a mistake of the user, 75 start again."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        # The verb's module is imported last: a mistake in a run file needs no JAX to be found.
        planned = args.command if args.verb == "lab" else args
        if args.verb == "train":  # before there is anything to save
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUE))
        if planned and planned.verb in ("train", "plan", "doctor", "profile"):
            load = importlib.import_module("holmesjax.job").load
            reads_data = _reads_data(planned)
            with Patience("planning") as say:
                planned.job = load(
                    planned.target, planned.overrides, reads_data=reads_data, say=say
                )
        return importlib.import_module(f"launch.verbs.{args.verb}").run(args)
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # before there was anything to save
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        return 0


if __name__ == "__main__":
    sys.exit(main())
