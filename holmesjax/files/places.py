"""Places that a user names: folders of this machine, and URLs of object stores.

A run folder in an object store has a folder here, too, in which the run works (`folder_of`):

    $XDG_CACHE_HOME/holmesjax/runs/s3/bucket/name/mirror.json      says the URL
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from holmesjax.errors import HolmesError, raise_if_passing
from holmesjax.files import json_text
from holmesjax.files.whole_files import write_whole

STORES = ("s3", "gs")  # schemes of the object stores that a run folder may be in
NOTE = "mirror.json"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")
_WORD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._=@+-]{0,200}")  # of a URL, between its slashes


def is_url(place: str | Path) -> bool:
    """Whether a place is one of an object store, and no folder.

    A URL that has been through `Path` has lost a slash.

    >>> is_url("s3://b/x"), is_url(Path("gs://b/x")), is_url("runs/s3")
    (True, True, False)
    """
    return _URL.match(str(place)) is not None


def mistake_in(url: str) -> str:
    """The mistake in the URL of a run folder; "" for none.

    >>> mistake_in("s3://bucket/runs/a"), mistake_in("ftp://host/a")
    ('', 'its store is ftp')
    >>> mistake_in("s3://bucket"), mistake_in("gs://b/../a")
    ('it names no folder in a bucket', "'..' is no name of a folder")
    """
    match = _URL.fullmatch(url)
    assert match, url
    words = match[2].rstrip("/").split("/")
    if match[1] not in STORES:
        return f"its store is {match[1]}"
    if wrong := [word for word in words if not _WORD.fullmatch(word)]:
        return f"{wrong[0]!r} is no name of a folder"
    return "" if len(words) > 1 else "it names no folder in a bucket"


def mistake_in_run_dir(place: str) -> str:
    """The mistake in the name of another machine's run folder; "" for none.

    >>> mistake_in_run_dir("/data/run"), mistake_in_run_dir("gs://b/x")
    ('', '')
    >>> mistake_in_run_dir("runs/a")
    'must be a whole path, from / on'
    """
    if is_url(place):
        mistake = mistake_in(place)
        return mistake and f"is a URL that names no run folder: {mistake}"
    return "" if place.startswith("/") else "must be a whole path, from / on"


def whole_url(place: str | Path) -> str | None:
    """A URL with both of its slashes, and without one at its end; None for a folder.

    >>> whole_url(Path("s3://b/x/")), whole_url("runs/x")
    ('s3://b/x', None)
    """
    match = _URL.fullmatch(str(place))
    return f"{match[1]}://{match[2].rstrip('/')}" if match else None


def folder_of(place: str | Path, env: Mapping[str, str] = os.environ) -> Path:
    """The folder of this machine in which a run works: the place itself, unless it is a URL.

    Raises HolmesError for a URL that is none of a run folder.

    >>> folder_of("s3://b/runs/x", {"XDG_CACHE_HOME": "/scratch"})
    PosixPath('/scratch/holmesjax/runs/s3/b/runs/x')
    >>> folder_of("runs/x")
    PosixPath('runs/x')
    """
    if (url := whole_url(place)) is None:
        return Path(place)
    if problem := mistake_in(url):
        fix = "write s3://BUCKET/NAME or gs://BUCKET/NAME, with letters, digits and ._=@+-"
        raise HolmesError(str(place), "is no run folder in a store", found=problem, fix=fix)
    scheme, _, rest = url.partition("://")
    home = env.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base.joinpath("holmesjax", "runs", scheme, *rest.split("/"))


def note_url(folder: Path, url: str) -> None:
    """Writes down that a run folder has a copy in an object store. Raises OSError."""
    if url_of(folder) != url:
        write_whole(folder / NOTE, json.dumps({"url": url}) + "\n")


def url_of(folder: str | Path) -> str | None:
    """The URL whose folder here this is, and that has a copy of it; None if it has none.

    A copy of such a folder in another place is an ordinary run folder.

    Raises HolmesError for a note that cannot be read.
    """
    path = Path(folder) / NOTE
    try:
        url = str(json_text.read(path)["url"])
        if is_url(url) and not mistake_in(url):
            return url if folder_of(url).resolve() == Path(folder).resolve() else None
        found: object = url[:80]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise_if_passing(error)
        found = error
    fix = "remove it, and name the URL again as run.dir"
    raise HolmesError(str(path), "names no run folder in a store", found=found, fix=fix)


def shown(folder: Path) -> str:
    """A run folder as others are told of it: its URL, or its whole path."""
    return url_of(folder) or str(folder.absolute())
