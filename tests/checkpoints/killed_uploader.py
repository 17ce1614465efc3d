"""Saves checkpoints of a run in an object store until it is killed; started by `test_kills`.

    python -m tests.checkpoints.killed_uploader URL

For each line on its input it forks a process, which starts the run at the URL, and saves after each
step, as far as an object store sees it. That process tells its id when it begins, and the parent
how it has ended. Modules are imported once.
"""

import hashlib
import itertools
import os
import sys
from pathlib import Path

from holmesjax.checkpoints import committed, manifest, mirror, newest_whole, stores
from holmesjax.files import places
from holmesjax.liveness.lease import Lease
from tests.checkpoints.forked_process import fork_for_each_line

FILES = ("part_0/d/a", "part_0/_METADATA", "part_1/d/b")
SIZE = 100_000
SAME = {"sequences": 0, "settings": {}, "data": {}, "plan_hash": "", "arrays": {}}


def content_of(file: str, step: int) -> bytes:
    """The bytes of a file of the checkpoint after a step."""
    return hashlib.sha256(f"{file} {step}".encode()).digest() * (SIZE // 32)


def save_for_ever(url: str, begun: int) -> None:
    """Saves after each step from the newest checkpoint on; writes its id to `begun`."""
    folder = places.folder_of(url)
    with Lease(folder) as lease:
        mirror.open_run(url, lease, lambda line: None)
        found = newest_whole.find(folder, print, move=lease.move, fetches=True)
        copy = mirror.of(folder)
        assert copy
        copy.begin(stores.start_name(stores.identifier(folder), lease.epoch))
        os.write(begun, f"{os.getpid()}\n".encode())
        for step in itertools.count(found.step + 1 if found else 1):
            save(folder, copy, step)


def save(folder: Path, copy: mirror.Mirror, step: int) -> None:
    """Saves as a run does."""
    path, files = manifest.begin(folder, step), {}
    for file in FILES:
        content = content_of(file, step)
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(content)
        files[file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    copy.upload(folder, step, files)
    where = {"id": "x", "node": "n", "folder": copy.url, "start": copy.start}
    parts = dict.fromkeys(map(manifest.part_of, files), where)
    text = manifest.describe(step, files=files, stores=parts, **SAME)
    copy.commit(folder, step, text)
    manifest.commit(folder, step, text)
    committed.note(folder, step)
    copy.follow(folder, [step - 1, step], step)


def main() -> None:
    fork_for_each_line(lambda begun: save_for_ever(sys.argv[1], begun))


if __name__ == "__main__":
    main()
