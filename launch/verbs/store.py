"""`launch store`: lets the processes of a job have what is in a run folder of this machine."""

import argparse
import os
import socket

from holmesjax.distributed.store_end import NOBODY, OwnStore
from holmesjax.files import places
from holmesjax.hosts import nics, process_environment
from holmesjax.hosts.process_environment import die_with


def run(args: argparse.Namespace) -> int:
    """Returns when the job has ended."""
    die_with(os.environ.get("HOLMES_PARENT"))
    controller = process_environment.controller_of(os.environ)
    if "%" in controller[0]:  # an interface of the launcher's host, not of this one
        own = process_environment.addresses_by_fabric(os.environ, nics.discover)
        controller = process_environment.controller_of(os.environ, own)
    folder = places.folder_of(args.run_dir)
    store = OwnStore(
        folder,
        process=NOBODY,
        node=os.environ.get("HOLMES_NODE") or socket.gethostname(),
        controller=controller,
        key=process_environment.key_of(os.environ),
    )
    if home := store.home():
        store.join(home)
    thread = store.serve()
    print(f"serving {args.run_dir}", flush=True)
    thread.join()
    return 0
