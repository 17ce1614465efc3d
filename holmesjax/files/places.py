"""Places that a user names: folders of this machine, and URLs of object stores."""

import re
from pathlib import Path


def is_url(place: str | Path) -> bool:
    """Whether a place is one of an object store, and no folder.

    A URL that has been through `Path` has lost a slash.

    >>> is_url("s3://b/x"), is_url(Path("gs://b/x")), is_url("runs/s3")
    (True, True, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(place)) is not None
