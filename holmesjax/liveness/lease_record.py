"""The record in a lease: which process of which host owns a folder, and whether it has ended."""

import contextlib
import datetime
import errno
import getpass
import json
import os
import secrets
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from holmesjax.files import json_text, regular_files

FILE = "owner.json"
Record = dict[str, Any]


def new_record() -> Record:
    """The record of this process, as it begins to take a lease."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": " ".join(shlex.join(sys.orig_argv).split())[:300],  # on one line
        **_machine(),
        "started": _started(os.getpid()),
        "token": secrets.token_hex(16),
        "epoch": f"{0:020}",
        "counter": f"{0:012}",  # all texts of a lease are equally long
    }


def text(record: Record) -> bytes:
    """The content of the file of a lease."""
    return json.dumps(record, indent=1).encode() + b"\n"


def read(path: Path) -> Record | None:
    """Reads the lease; None if there is none. Raises OSError where that is not to be seen."""
    try:
        content = regular_files.read_bytes(path)  # opened anew each time: NFS then asks the server
    except FileNotFoundError:
        return None
    except OSError as error:
        # Deleted on another host, or the server was away; it lists the names if it is there.
        if error.errno == errno.ESTALE and path.name not in os.listdir(path.parent):
            return None
        raise
    return record_in(content)


def record_in(content: bytes) -> Record:
    """The record in a file of a lease; that of a file that is none has its text."""
    try:
        record = json_text.value_of(content)
    except ValueError:
        record = None
    return record if isinstance(record, dict) else {"text": content.decode(errors="replace")}


def is_of(found: Record, record: Record) -> bool:
    """Whether a lease that was read is an owner's own; the counter may have moved."""
    return all(found.get(name) == record[name] for name in ("token", "epoch"))


def beside(path: Path, name: str) -> Path:
    """A hidden name in the folder of a lease, as its owners make them."""
    return path.with_name(f".{path.name}.{name}")


def remove(path: Path, record: Record) -> bool:
    """Deletes the lease if it is `record`; returns false if it is another one, or missing."""
    aside = beside(path, secrets.token_hex(8))
    is_that = lambda found: found is not None and found.get("token") == record.get("token")
    if not is_that(read(path)):
        return False
    try:
        path.rename(aside)
    except FileNotFoundError:
        if not aside.exists():  # the answer of a server may have been lost
            return False
    was_that = is_that(read(aside))
    if not was_that:  # somebody was faster, in the moment after we looked
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(aside, path)
    with contextlib.suppress(OSError):  # it is no lease any more
        aside.unlink(missing_ok=True)
    return was_that


def _machine() -> Record:
    """The space in which a process number means a process: two containers have two."""
    try:
        return {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "processes": os.readlink("/proc/self/ns/pid"),
        }
    except OSError:  # no Linux
        return {"boot": "", "processes": ""}


def is_here(record: Record) -> bool:
    """Whether the owner is a process of this machine, or of this container."""
    here = {"host": socket.gethostname(), **_machine()}
    return bool(here["boot"]) and all(record.get(name) == here[name] for name in here)


def is_gone(record: Record) -> bool:
    """Tells whether the owner's process has certainly ended."""
    pid = record.get("pid")
    if not is_here(record) or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user, whose processes /proc may hide
        return _started(pid) not in (record.get("started"), "")
    return _started(pid) != record.get("started")


def _started(pid: int) -> str:
    """When a process started, in ticks of its machine; "" for none, or one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def who(record: Record) -> str:
    """The owner, in words."""
    if "token" not in record:
        return f"somebody whose {FILE} makes no sense"
    return "process {pid} on {host} (user {user}, since {since}): {command}".format_map(
        {name: "?" for name in new_record()} | record
    )
