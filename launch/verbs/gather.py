"""`launch gather`: makes one checkpoint of the parts that are in several stores."""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import queue
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest, stores
from holmesjax.checkpoints.copy_progress import CopyProgress
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.stores import PIECE_BYTES
from holmesjax.data import object_stores
from holmesjax.distributed.messages import ControllerHello, MemberHello
from holmesjax.distributed.store_hub import StoreHub
from holmesjax.distributed.store_messages import AskPiece
from holmesjax.errors import CheckpointError, ConfigError, PeerError
from holmesjax.files import places, whole_files
from holmesjax.job import Job
from holmesjax.plan.processes import node_processes
from holmesjax.transport import connections, key_files
from holmesjax.transport.admission import Admission
from launch.launchers import table
from launch.launchers.launcher import unwinding
from launch.verbs.verify import chosen
from launch.workers import start_stores

WAIT_S = 60.0  # for stores that a launcher starts
PASSIVE_WAIT_S = 600.0  # and for those that somebody starts

say = functools.partial(print, flush=True)


def run(args: argparse.Namespace) -> int:
    """Returns 0 once all is there. Raises HolmesError where it cannot be."""
    run_dir = Path(args.run_dir)
    found = chosen(run_dir, args.step)[0]
    manifest.verify(found)
    target = object_stores.path_of(args.to)
    if not places.is_url(args.to) and target.resolve() == run_dir.resolve():
        fix = "name another folder, or a URL of a store"
        raise ConfigError("--to", "is the run folder itself", found=args.to, fix=fix)
    with unwinding(), _stores(jobs.load_saved(run_dir), found, args) as read:
        _write_all(target, run_dir, found, read)
    print(f"gathered    step {found.step}: {args.to}")
    return 0


Read = Callable[[str, int, int], bytes]  # bytes of a file of the run, from a place on


@contextlib.contextmanager
def _stores(job: Job, found: Checkpoint, args: argparse.Namespace) -> Iterator[Read]:
    """Starts a process on each node that has a part which is not here, and reads there, too."""
    away = manifest.elsewhere(found)
    if not away:
        yield lambda name, first, count: stores.read_piece(job.run_dir, name, first, count)
        return
    kind = table.LAUNCHERS[args.launcher or "local"]
    launcher = table.make(kind, job.topology, args)
    names = {where["node"] for where in away.values() if not places.is_url(where["folder"])}
    nodes = [process for process in node_processes(job.topology) if process.node in names]
    given = os.environ.get("HOLMES_KEY_FILE") if kind.is_passive else None
    key_file = Path(given or job.run_dir / f"gather_{secrets.token_hex(4)}.key")
    wait_s = PASSIVE_WAIT_S if kind.is_passive else WAIT_S
    with contextlib.ExitStack() as stack:
        if given:
            key = key_files.read_key_file(key_file)
        else:
            stack.callback(key_file.unlink, missing_ok=True)
            key = key_files.make_key_file(key_file)
        hub = StoreHub(job.run_dir, (), say, wait_s)
        stack.callback(hub.close)
        sock = connections.listen(launcher.address, launcher.port)
        address = connections.address_of(sock)
        stack.enter_context(
            Admission(
                sock,
                key=key,
                hello=ControllerHello(session=secrets.token_hex(8)),
                expected=MemberHello,
                check=lambda hello: None if hello.store else "no run is trained here",
                enter=hub.enter,
            )
        )
        stack.callback(launcher.end)
        start_stores(
            launcher,
            nodes,
            address,
            run_dir=job.run_dir,
            key_file=key_file,
            events=queue.SimpleQueue(),
        )
        hub.gathered(found)
        yield lambda name, first, count: _ask(hub, AskPiece(name=name, first=first, count=count))


def _ask(hub: StoreHub, question: AskPiece) -> bytes:
    try:
        return hub.read(question)
    except (OSError, ValueError, LookupError) as error:
        fix = "see that the node which has it is up, and do it again: it goes on where it stopped"
        raise PeerError(question.name, "cannot be read", found=error, fix=fix) from None


def _write_all(target: Path, run_dir: Path, found: Checkpoint, read: Read) -> None:
    """Writes a run folder with one checkpoint: its manifest last."""
    content = dict(found.manifest)
    content.pop("stores", None)
    if url := places.whole_url(str(target)):  # for whoever trains on from there, and lacks them
        where = {"id": "", "node": "", "folder": url}
        content["stores"] = dict.fromkeys(map(manifest.part_of, content["files"]), where)
    name = stores.name_in(found.step, manifest.MANIFEST)
    if (target / name).exists():
        fix = "name another place, or remove it"
        raise CheckpointError(str(target / name), "is there already", found="a file", fix=fix)
    files: dict[str, dict[str, Any]] = content["files"]
    total = sum(facts["bytes"] for facts in files.values())
    progress = CopyProgress(f"gathering   step {found.step}", total, 0, say)
    for file, facts in files.items():
        _copy(target, stores.name_in(found.step, file), facts, read, progress)
    for run_file, num_bytes in stores.run_files(run_dir).items():
        if run_file != "committed.json":
            _put(target / run_file, stores.read_whole(run_dir, run_file, num_bytes))
    _put(target / "committed.json", json.dumps({"step": found.step}).encode() + b"\n")
    if not places.is_url(str(target)):
        whole_files.sync_below(target)
        with contextlib.suppress(PermissionError):  # a folder that only root may read
            whole_files.sync(target.absolute().parent)
    _put(target / name, manifest.text_of(content).encode())


def _copy(
    target: Path, name: str, facts: dict[str, Any], read: Read, progress: CopyProgress
) -> None:
    """Copies a file a piece at a time; one that is there whole is left as it is."""
    path, size, digest = target / name, int(facts["bytes"]), hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size == size and facts["sha256"] in (None, _sha256_of(path)):
            progress.skip(size)
            return
    temporary = path if places.is_url(str(target)) else path.with_name(f"{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file:  # an object appears when it is closed
        for first in range(0, size, PIECE_BYTES):
            content = read(name, first, min(PIECE_BYTES, size - first))
            digest.update(content)
            file.write(content)
            progress.add(len(content))
    if facts["sha256"] not in (None, digest.hexdigest()):
        fix = "see which store has damaged it: python -m launch verify, where the part is"
        raise CheckpointError(name, "is not as it was written", found=digest.hexdigest(), fix=fix)
    if temporary is not path:
        whole_files.sync(temporary)  # by its size alone the next gathering takes it for whole
        temporary.replace(path)


def _sha256_of(path: Path) -> str:
    """That of a file, also of one at a URL."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put(path: Path, content: bytes) -> None:
    """Writes a small file, which is whole wherever this is cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if places.is_url(str(path)):
        path.write_bytes(content)  # an object appears when all of it is there
    else:
        whole_files.write_whole(path, content)
