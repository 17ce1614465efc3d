"""A mailbox belongs to one run: the first of its islands claims it, and others see that.

It claims the mailbox for its data, too: files of one name have to be the same at all sites.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from holmesjax.errors import HolmesError
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import DamagedObjectError

MAILBOX = "parallel.mailbox"
SHOWN, MOST_FILES = 12, 3  # digits of a digest, and files, in a message
# Settings that earlier versions did not have, and what their islands did.
LATER = {"data.mixture_by_island": None}


def claim(place: Counted, run: Mapping[str, object], where: str) -> None:
    """Makes a mailbox that of a run, or finds that it is.

    Settings are compared that the mailbox knows, and those of `LATER`: an earlier version has
    written down fewer.

    Raises HolmesError for the mailbox of another run, with the settings that differ, and OSError.
    """
    content = records.sealed(run)
    if place.read(records.RUN) is None:  # before anybody may take it for a mailbox
        _refuse_without_condition(place, where)
    try:
        place.put(records.RUN, content, replaces=False)
    except FileExistsError:
        try:
            found = LATER | records.opened(place.read(records.RUN) or b"", records.RUN)
        except DamagedObjectError as error:
            fix = "name another parallel.mailbox, or empty this one before all islands start"
            raise HolmesError(where, "is no mailbox", found=error, fix=fix) from None
        differ = [name for name in run if name in found and found[name] != run[name]]
        if any(name.startswith("model.") for name in differ):
            differ = [name for name in differ if name != "model"]  # the digest of these
        if differ:
            raise HolmesError(
                where,
                "is the mailbox of another run",
                found=", ".join(f"{name}: {found[name]}, not {run[name]}" for name in differ),
                fix="give all islands the same settings, and paths of their own in data.paths; "
                "a run of other settings has a parallel.mailbox of its own",
            ) from None


def claim_data(place: Counted, digests: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Makes the data of a run those of its mailbox, or finds that they are.

    Args:
      place: the mailbox.
      digests: of each split and of the order, without what an island has of its own.
      files: SHA-256 by the name of each file, wherever it lies.

    Raises HolmesError for other data, with the files that differ, and where the record of the data
    is damaged; and OSError.
    """
    if found := _claimed_data(place):
        _refuse_other_data(place, found, digests, files)
        return
    content = records.sealed(files)
    name = f"{records.FILES}.{hashlib.sha256(content).hexdigest()[:12]}.json"
    place.put(name, content)  # the same bytes, whoever writes them
    try:
        claimed = {"digests": dict(digests), "files": name}
        place.put(records.DATA, records.sealed(claimed), replaces=False)
    except FileExistsError:  # another island was faster
        found = _claimed_data(place) or {"digests": {}, "files": ""}
        if found["files"] != name:
            place.remove([name])
        _refuse_other_data(place, found, digests, files)


def _claimed_data(place: Counted) -> dict[str, Any] | None:
    """The record of the data; None if it is not there.

    A damaged one stays until the user removes it. Who removed it by himself could remove that of
    another island, which has just written it again: then nobody would compare the two.
    """
    content = place.read(records.DATA)
    try:
        return None if content is None else records.opened(content, records.DATA)
    except DamagedObjectError as error:
        fix = f"remove {records.DATA} of the mailbox, if all islands have the files that are here"
        raise HolmesError(
            MAILBOX, "has a damaged record of its data", found=error, fix=fix
        ) from None


def _claimed_files(place: Counted, name: str) -> Mapping[str, str]:
    """The files of the claim, by their names; none if their record is gone or damaged."""
    try:
        return records.opened(place.read(name) or b"", name) if name else {}
    except DamagedObjectError:
        return {}


def _refuse_other_data(
    place: Counted,
    found: Mapping[str, Any],
    digests: Mapping[str, str],
    files: Mapping[str, str],
) -> None:
    """Raises HolmesError where data differ that both have."""
    theirs = found["digests"]
    differ = [name for name in digests if theirs.get(name, digests[name]) != digests[name]]
    if not differ:
        return
    if all(name.startswith("order") for name in differ):
        raise HolmesError(
            MAILBOX,
            "is of islands that read their data in another order",
            found=", ".join(differ),
            fix="use one version of HolmesJAX for all islands",
        )
    known = _claimed_files(place, found["files"])
    unlike = sorted(name for name in {*known, *files} if known.get(name) != files.get(name))
    digest = lambda of, name: f"SHA-256 {of[name][:SHOWN]}" if name in of else "missing"
    said = [f"{name}: {digest(known, name)}, and {digest(files, name)} here" for name in unlike]
    more = f"; and {len(unlike) - MOST_FILES:,} more files" if len(unlike) > MOST_FILES else ""
    problem = f"is of islands that read other data ({', '.join(differ)})"
    if not unlike:
        fix = "use one version of HolmesJAX and of its packages for all islands"
        raise HolmesError(MAILBOX, problem, found="all files are the same", fix=fix)
    raise HolmesError(
        MAILBOX,
        problem,
        found="; ".join(said[:MOST_FILES]) + more,
        fix="give all islands the same files, and paths of their own in data.paths "
        "(python-stdlib is the same for one patch release of Python); or remove "
        f"{records.DATA} of the mailbox, if all islands get the files that are here",
    )


def _refuse_without_condition(place: Counted, where: str) -> None:
    """Raises HolmesError for a store that writes an object over another one, told not to."""
    name = f"probe.{secrets.token_hex(8)}"
    try:
        for content in (b"first", b"second"):
            place.put(name, content, replaces=False)
    except FileExistsError:
        return
    finally:
        place.remove([name])
    raise HolmesError(
        where,
        "is in a store without conditional writes: two islands could merge one round",
        found="it wrote an object over another one",
        fix="use a store that knows If-None-Match, or a folder that all islands see",
    )
