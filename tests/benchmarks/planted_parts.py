"""Parts of a day on a GPU that end in every way that a process can end. No JAX."""

import os
import time
from pathlib import Path


def note(path, rehearse):
    """Notes that it ran."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("ran\n")
    yield {"what": "a", "is": f"rehearsal {rehearse}"}
    yield {"what": "b", "rate": "1 TFLOP/s", "spread": 0.5}


def crash(_, rehearse):
    yield {"what": "before", "is": "well"}
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def die(_, rehearse):
    yield {"what": "before", "is": "well"}
    os._exit(7)


def hang(path, rehearse):
    """Starts a process that hangs as well."""
    yield {"what": "before", "is": "well"}
    child = os.fork()
    if child:
        Path(path).write_text(str(child))
    time.sleep(600)


def meet(folder, rehearse):
    """Ends when two processes are here at the same time."""
    Path(folder, str(os.getpid())).touch()
    deadline_s = time.monotonic() + 60
    while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    yield {"what": "met", "is": str(len(list(Path(folder).iterdir())))}


def environment(names, rehearse):
    for name in names:
        yield {"what": name, "is": os.environ.get(name, "")}
