"""Names of the Hugging Face Hub where a path is meant: nothing is downloaded, so how to do it."""

import os
import re
from pathlib import Path

ADDRESS = re.compile(r"(?:hf://|https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/)(?:datasets/)?")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WORD = re.compile(r"[A-Za-z0-9][\w-]*")
FILES = (".yaml", ".yml", ".json", ".jsonl", ".txt", ".gz", ".zst", ".parquet")  # no name has these


def hub_name(name: str) -> str | None:
    """The OWNER/NAME that a user means; None: it is the path of something that may be here.

    >>> hub_name("meta-llama/Llama-3-8B"), hub_name("https://huggingface.co/datasets/a/b")
    ('meta-llama/Llama-3-8B', 'a/b')
    >>> hub_name("./a/b"), hub_name("a/b.yaml")
    (None, None)
    """
    own = ADDRESS.sub("", name, count=1)
    if not NAME.fullmatch(own) or Path(own).suffix.lower() in FILES:
        return None
    return None if own == name and os.path.isdir(Path(own).parent) else own


def snapshot_of(folder: Path) -> Path | None:
    """The files of a model or a data set in a folder of the Hub's cache; None: it is none."""
    try:
        if not all((folder / part).is_dir() for part in ("blobs", "refs", "snapshots")):
            return None
        head = folder / "refs" / "main"
        version = head.read_text().strip() if head.is_file() else ""
        there = sorted((folder / "snapshots").iterdir())
    except (OSError, ValueError):  # a name that is too long, say: whoever reads the path says so
        return None
    return next((path for path in there if path.name == version), there[0] if there else None)


def fix(name: str, otherwise: str, *, folder: str = "models", use: str = "") -> str:
    """The way out where a path is not there: a download, if it is a name of the Hub.

    Args:
      name: that the user wrote.
      otherwise: what to do about any other path.
      folder: for the download: "models", "tokenizers" or "corpora".
      use: what to do afterwards, with `{}` for the folder; empty: name it.

    >>> fix("a/b", "name a folder", folder="corpora").partition("so: ")[2]
    'hf download a/b --repo-type dataset --local-dir corpora/b; then name corpora/b'
    >>> fix("gpt2", "name a folder"), fix("./" + "x" * 300, "name a folder")
    ('name a folder; nothing is downloaded', 'name a folder')
    """
    if (snapshot := snapshot_of(Path(name))) is not None:
        return f"name the folder that has the files: {snapshot}"
    if (own := hub_name(name)) is None:
        is_word = WORD.fullmatch(name) is not None
        return f"{otherwise}; nothing is downloaded" if is_word else otherwise
    place = f"{folder}/{own.rpartition('/')[2]}"
    kind = " --repo-type dataset" if folder == "corpora" else ""
    then = use.format(place) or f"name {place}"
    return (
        f"nothing is downloaded: do it so: hf download {own}{kind} --local-dir {place}; then {then}"
    )
