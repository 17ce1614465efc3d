"""`launch relay`: joins processes of a job that cannot call each other."""

import argparse
import os
import signal
from pathlib import Path

from holmesjax.errors import ConfigError, of_system
from holmesjax.transport import addresses, connections, key_files
from holmesjax.transport.relay import Relay
from holmesjax.transport.relay_messages import relay_key
from launch.launchers.launcher import unwinding


def run(args: argparse.Namespace) -> int:
    """Returns 0 once the relay is asked to end. Raises HolmesError if it cannot begin."""
    if (args.listen is None) == (args.make_key is None):
        problem, fix = "needs one of --listen and --make-key", "write --listen 0.0.0.0:7443, say"
        raise ConfigError("relay", problem, found="both" if args.listen else "none", fix=fix)
    if args.make_key is not None:
        _write_key(Path(args.key_file), relay_key(key_files.read_key_file(args.make_key)))
        print(f"{args.key_file} is for relays of the job whose key is in {args.make_key}")
        return 0
    address, port = _place(args.listen)
    connections.raise_open_files()
    key = key_files.read_key_file(args.key_file)
    with unwinding(), Relay(address, port, key=key, say=_say) as relay:
        _say(f"the relay is at {addresses.show(*relay.address)}")
        while True:
            signal.pause()


def _say(text: str) -> None:
    print(text, flush=True)


def _place(text: str) -> tuple[str, int]:
    try:
        address, port = addresses.parse(text)
        if addresses.RELAYED in address:
            raise ValueError("a relay behind another one")
    except ValueError as error:
        problem, fix = "must be an address of this machine", "write --listen 0.0.0.0:7443, say"
        raise ConfigError("--listen", f"{problem}: {error}", found=text, fix=fix) from None
    return address, port


def _write_key(path: Path, key: bytes) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key.hex())
    except FileExistsError:
        problem, fix = "is there already", "remove it, or name another file"
        raise ConfigError("--key-file", problem, found=str(path), fix=fix) from None
    except OSError as error:
        raise of_system(error, path) from None
