"""`launch agent`: answers `doctor` and `probe`, which start it, about its node."""

import argparse
import functools
import os

from holmesjax.hosts import agent, nics
from holmesjax.hosts.process_environment import ProcessEnvironment, die_with


def run(args: argparse.Namespace) -> int:
    die_with(os.environ.get("HOLMES_PARENT"))
    find_host = functools.cache(nics.discover)
    return agent.serve(ProcessEnvironment.read(os.environ, find_host), find_host, os.environ)
