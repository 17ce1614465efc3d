"""A mailbox belongs to one run: the first of its islands claims it, and others see that."""

import secrets
from collections.abc import Mapping

from holmesjax.errors import HolmesError
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import DamagedObjectError


def claim(place: Counted, run: Mapping[str, object], where: str) -> None:
    """Makes a mailbox that of a run, or finds that it is.

    Settings are compared that the mailbox knows: an earlier version has written down fewer.

    Raises HolmesError for the mailbox of another run, with the settings that differ, and OSError.
    """
    content = records.sealed(run)
    if place.read(records.RUN) is None:  # before anybody may take it for a mailbox
        _refuse_without_condition(place, where)
    try:
        place.put(records.RUN, content, replaces=False)
    except FileExistsError:
        try:
            found = records.opened(place.read(records.RUN) or b"", records.RUN)
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
