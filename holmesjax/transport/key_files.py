"""The key of a job, in a file that only its owner can read."""

import hashlib
import os
import secrets
from pathlib import Path

from holmesjax.errors import HolmesError, raise_if_passing
from holmesjax.files import regular_files

KEY_BYTES = 32


def make_key_file(path: str | Path) -> bytes:
    """Writes a new key into a file of mode 0600; an old file is replaced."""
    key = secrets.token_bytes(KEY_BYTES)
    Path(path).unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex())
    return key


def read_key_file(path: str | Path) -> bytes:
    """Reads the job's key. Raises HolmesError if others can read the file, or it holds no key."""
    fix = "start the job again, or copy its key file with mode 0600 to this machine"
    try:
        mode, text = Path(path).stat().st_mode & 0o777, regular_files.read_text(path)
        key = bytes.fromhex(text)
    except (OSError, ValueError) as error:
        raise_if_passing(error)
        raise HolmesError(str(path), "holds no key of a job", found=error, fix=fix) from None
    if mode & 0o077:
        problem = "the key of a job must be readable by its owner only"
        raise HolmesError(str(path), problem, found=f"mode {mode:04o}", fix=f"chmod 600 {path}")
    if len(key) != KEY_BYTES:
        found = f"{len(key)} bytes"
        raise HolmesError(str(path), f"must hold {KEY_BYTES} bytes in hex", found=found, fix=fix)
    return key


def key_digest(key: bytes) -> str:
    """Returns 16 hex digits that tell keys apart, and reveal nothing about a key."""
    return hashlib.sha256(b"key of a job" + key).hexdigest()[:16]
