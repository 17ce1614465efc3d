"""`launch agent`: answers the questions of `doctor` and `probe` about its node; they start it."""

import argparse
import functools
import os

from holmesjax import agent, discovery
from holmesjax.place import Place


def run(args: argparse.Namespace) -> int:
    find_host = functools.cache(discovery.discover)
    return agent.serve(Place.from_environment(os.environ, find_host), find_host)
