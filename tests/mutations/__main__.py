"""Plants each bug of `bugs` in a copy of the checkout, and sees whether its tests fail.

examples:
  python -m tests.mutations -j 2             all bugs, two at a time
  python -m tests.mutations silent-link      one bug by its name
  python -m tests.mutations --list           names, and what is wrong

The tests of all bugs run once without any bug. Then each bug is planted alone, and its own tests
run. A bug is found if a test fails, and lives if all pass. Exit status: 0 all bugs are found,
1 a bug lives, or its tests do not pass without it, 2 a mistake in the arguments.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutations.bug import Bug
from tests.mutations.bugs import BUGS

ROOT = Path(__file__).parent.parent.parent
TEST_LIMIT_S = 120  # for one test: a bug may make it wait for ever
RUN_LIMIT_S = 300  # for the tests of one bug
ALL_LIMIT_S = 1800  # for the tests of all bugs, without a bug
PASSED, FAILED = 0, 1  # exit statuses of pytest


def copy_checkout(target: Path) -> None:
    """Copies the files that git knows or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(
    tree: Path, tests: Sequence[str], limit_s: float, *options: str, **env: str
) -> tuple[int | None, str]:
    """Runs tests in a copy; pytest's exit status, None after `limit_s`, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-rfE"]
    command += ["-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}", *options, *tests]
    own = {"PYTHONPATH": str(tree), "COLUMNS": "200"}
    child = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, **own, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests have started can be ended with them
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
        return child.returncode, output
    except subprocess.TimeoutExpired:
        return None, f"not done within {limit_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def failures(output: str) -> list[str]:
    """The node ids of the tests that failed, from pytest's summary."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def plant(bug: Bug, tree: Path) -> None:
    """Writes the module with the bug."""
    path = bug.path(tree)
    about = path.stat()
    path.write_text(bug.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
    # Python compares times in whole seconds: the compiled module without the bug must look old.
    os.utime(path, (about.st_atime, about.st_mtime + 10))


def try_bug(bug: Bug, trees: "queue.Queue[Path]") -> tuple[bool, str, float]:
    """Whether the tests find the bug, which test or why not, and the seconds it took."""
    tree, start_s = trees.get(), time.monotonic()
    try:
        aside = tree.with_name(f"{tree.name}.py")  # the checkout may have changed since
        path = bug.path(tree)
        shutil.copy2(path, aside)
        plant(bug, tree)
        try:
            status, output = run_tests(
                tree, bug.tests, RUN_LIMIT_S, "-x", PYTHONDONTWRITEBYTECODE="1"
            )
        finally:
            shutil.copy2(aside, path)
    finally:
        trees.put(tree)
    failed, took_s = failures(output), time.monotonic() - start_s
    if status == FAILED and failed:
        return True, failed[0], took_s
    if status == PASSED:
        return False, f"LIVES: {bug.wrong}", took_s
    return False, f"NO VERDICT, pytest ended with {status}:\n{output[-2000:]}", took_s


def try_all(bugs: Sequence[Bug], num_jobs: int) -> int:
    """Tries all bugs; the exit status."""
    start_s = time.monotonic()
    num_jobs = min(num_jobs, len(bugs))
    width = max(len(bug.name) for bug in bugs)
    with tempfile.TemporaryDirectory(prefix="holmesjax-mutations-") as folder:
        first = Path(folder, "0")
        copy_checkout(first)
        tests = list(dict.fromkeys(test for bug in bugs for test in bug.tests))
        print(f"{len(tests)} tests without a bug", flush=True)
        spread = ("-n", str(num_jobs)) if num_jobs > 1 else ()
        status, output = run_tests(first, tests, ALL_LIMIT_S, *spread)
        if status not in (PASSED, FAILED):
            print(f"pytest ended with {status}:\n{output[-4000:]}")
            return 1
        broken = failures(output)
        print(f"{time.monotonic() - start_s:.0f} s, {len(broken)} failed", *broken, sep="\n  ")
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(num_jobs):
            tree = Path(folder, str(number))
            if tree != first:
                shutil.copytree(first, tree)  # with the compiled modules
            trees.put(tree)
        missed = []
        with ThreadPoolExecutor(num_jobs) as pool:
            running = {pool.submit(try_bug, bug, trees): bug for bug in bugs}
            for number, done in enumerate(as_completed(running), start=1):
                bug, (is_found, text, took_s) = running[done], done.result()
                if any(name.startswith(bug.tests) for name in broken):
                    is_found, text = False, "NO VERDICT: its tests fail without it"
                if not is_found:
                    missed.append(bug.name)
                print(
                    f"[{number:{len(str(len(bugs)))}}/{len(bugs)}] {bug.name:{width}} "
                    f"{took_s:5.1f} s  {text}",
                    flush=True,
                )
    print(f"{len(bugs) - len(missed)} of {len(bugs)} found in {time.monotonic() - start_s:.0f} s")
    if missed:
        print(f"not found: {', '.join(sorted(missed))}")
    return 1 if missed else 0


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.mutations", description=__doc__, formatter_class=raw
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs to try; all by default")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="bugs at the same time")
    parser.add_argument("--list", action="store_true", help="print the bugs and stop")
    args = parser.parse_args()
    if unknown := set(args.names) - {bug.name for bug in BUGS}:
        parser.error(f"no such bug: {', '.join(sorted(unknown))}")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {args.jobs}")
    chosen = [bug for bug in BUGS if not args.names or bug.name in args.names]
    if args.list:
        for bug in chosen:
            print(f"{bug.name:24} {bug.module}: {bug.wrong}")
        return 0
    return try_all(chosen, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
