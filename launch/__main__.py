"""Runs one verb: `python -m launch VERB ...`; `arguments` describes them."""

from launch import broken_imports

with broken_imports.Told():
    import argparse
    import contextlib
    import functools
    import gc
    import importlib
    import io
    import os
    import signal
    import sys
    from collections.abc import Callable, Sequence
    from typing import Any, Literal

    from holmesjax.errors import REQUEUE, AbsentDataError, ConfigError, HolmesError, of_system
    from holmesjax.files import places
    from holmesjax.hosts import jax_settings
    from holmesjax.liveness import hung_main_thread
    from launch import outputs
    from launch.arguments import parse
    from launch.launchers.table import LAUNCHERS
    from launch.progress_message import ProgressMessage

END_S = 10.0  # for what packages do when Python ends
OUTPUT = "standard output"


def _data_reader(args: argparse.Namespace, *, in_lab: bool) -> Literal["process", "node"] | None:
    """Who would read the data of the run here; a plan looks at the data that is here."""
    if args.verb == "train" and args.launcher is None and not in_lab:
        return "process"
    is_here = args.verb == "train" and (args.launcher is None or LAUNCHERS[args.launcher].is_here)
    return "node" if is_here or args.verb == "plan" else None


def _will_own(args: argparse.Namespace) -> bool:
    """Whether this process takes the run folder; a scheduler's job does so when it starts."""
    return args.verb == "train" and not (args.launcher and LAUNCHERS[args.launcher].needs_job)


def _load(
    load: Callable[..., Any], args: argparse.Namespace, *, in_lab: bool, only_shows: bool
) -> Any:
    """Loads the job of a verb. Data that is not on this machine does not hinder a plan."""
    reads_data = _data_reader(args, in_lab=in_lab)
    with ProgressMessage("planning") as say:
        load_here = functools.partial(
            load,
            args.target,
            args.overrides,
            waits_for_data=args.verb != "plan",
            compares=args.verb in ("plan", "train"),
            say=say,
            env=os.environ,
            what_if=getattr(args, "what_if", ()),
            will_own=_will_own(args) and not only_shows,
        )
        try:
            return load_here(reads_data=reads_data)
        except AbsentDataError as error:
            if args.verb != "plan":
                raise
            print(f"note: {error.where} {error.problem}, so it is not checked", file=sys.stderr)
            print(f"  found: {error.found}", file=sys.stderr)
            return load_here()


def _bring_runs(*found: argparse.Namespace | None) -> None:
    """Replaces the URL of a run by the run's folder here, where a verb reads one.

    Raises ConfigError for a URL where only a file or folder of this machine can be written.
    """
    say = functools.partial(print, flush=True, file=sys.stderr)
    for args in filter(None, found):
        for name in ("to", "out", "output"):
            target = str(getattr(args, name, None))
            if places.is_url(target) and args.verb != "gather":
                fix = "name a place here; `launch gather RUN --to URL` writes a run into a store"
                raise ConfigError(f"--{name}", "is a URL, and no place here", found=target, fix=fix)
        for name in ("target", "run_dir"):
            place = getattr(args, name, None)
            if place and places.is_url(place) and args.verb not in ("worker", "store"):
                setattr(args, name, _brought(place, say))
        if several := getattr(args, "run_dirs", None):
            args.run_dirs = [_brought(place, say) for place in several]


def _brought(place: str, say: Callable[[str], object]) -> str:
    """Returns the folder here of a run that may be at a URL."""
    if not places.is_url(place):
        return place
    return str(importlib.import_module("holmesjax.checkpoints.mirror").bring(place, say))


def _collect_garbage() -> None:
    """Turns garbage collection on if it is off, but for the objects of imported modules."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 cannot go on, 2 a mistake of the user, 75 start again."""
    outputs.accept_any_text()
    try:
        status = _main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except OSError as error:  # of a disk, a file server or the output
        failed = of_system(error)
        if error.filename == OUTPUT:
            _lose_output()
            if isinstance(error, BrokenPipeError):  # `| head` has seen enough
                return 0
            fix = "make room where it goes, and do it again"
            failed = HolmesError(OUTPUT, "cannot be written", found=error.strerror, fix=fix)
        _say(failed)
        return failed.exit_status


class _Output(io.FileIO):
    """Standard output, whose errors say that it is that."""

    def write(self, content: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, OUTPUT) from None


class _Messages(io.FileIO):
    """Standard error, which drops what it cannot take: the exit status says it, too."""

    def write(self, content: Any) -> int | None:  # type: ignore[override]
        with contextlib.suppress(OSError):
            return super().write(content)
        return len(content)


def _tell_outputs_apart() -> None:
    """Makes the errors of standard output name it, and those of standard error go away."""
    for name, kind in (("stdout", _Output), ("stderr", _Messages)):
        # Python has none for a descriptor that was closed before it started.
        if (before := getattr(sys, name)) is not None:
            buffer = io.BufferedWriter(kind(before.fileno(), "w", closefd=False))
            options = {"encoding": before.encoding, "errors": before.errors}
            is_by_line = name == "stderr" or before.isatty()
            setattr(sys, name, io.TextIOWrapper(buffer, **options, line_buffering=is_by_line))


def _lose_output() -> None:
    """Lets what is left of the output go nowhere: Python would fail with it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _say(error: HolmesError) -> None:
    print(f"error: {error}", file=sys.stderr)


def _main(argv: Sequence[str] | None) -> int:
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except HolmesError as error:
        _say(error)
        return error.exit_status
    # Nothing that supervises may wait for whoever reads its output, or end with it.
    with outputs.queued() if args.verb in ("train", "lab") else contextlib.nullcontext():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        for name, value in jax_settings.take_away(os.environ).items():
            what = "what a run computes follows from its run file alone"
            print(f"note: {name}={value} of the environment is not used: {what}", file=sys.stderr)
        # The verb's module is imported last: a mistake in a run file needs no JAX to be found.
        planned = args.command if args.verb == "lab" else args
        if args.verb == "train":  # before there is anything to save
            for number in set(hung_main_thread.stop_signals()) - {signal.SIGINT}:
                signal.signal(number, lambda *_: sys.exit(REQUEUE))
        _bring_runs(args, planned)
        if planned and hasattr(planned, "target"):  # a verb of a run
            load = importlib.import_module("holmesjax.job").load
            _collect_garbage()
            only_shows = getattr(args, "dry_run", False)
            planned.job = _load(load, planned, in_lab=planned is not args, only_shows=only_shows)
        verb = importlib.import_module(f"launch.verbs.{args.verb}")
        _collect_garbage()
        return verb.run(args)
    except HolmesError as error:
        _say(error)
        return error.exit_status
    except ValueError as error:
        if refused := jax_settings.refusal(error, os.environ):
            _say(refused)
            return refused.exit_status
        raise
    except KeyboardInterrupt:  # before there was anything to save
        return 130


if __name__ == "__main__":
    gc.disable()  # looking at what imports make again and again takes a fifth of their time
    _tell_outputs_apart()
    with broken_imports.Told():
        exit_status = main()
    hung_main_thread.end_within(END_S, exit_status)  # Weights & Biases waits for a network, say
    sys.exit(exit_status)
