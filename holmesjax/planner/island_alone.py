"""The job of one island that waits for nobody: its machines, its part of the batch, its folder.

Each island of a run with K takes batches of a K-th. How many steps it takes is not known
before, since all together train the tokens of the run: it is the most, as if it trained alone.
"""

import os
from dataclasses import replace

from holmesjax.config import Config, PlaceConfig
from holmesjax.errors import PlanError
from holmesjax.files import places
from holmesjax.planner.islands import clusters_of, name_of, part_of
from holmesjax.topology.machines import Topology


def alone(config: Config, topology: Topology) -> tuple[Config, Topology]:
    """The config and the machines of the island's job that a run names, if it names one.

    Those of an island's run folder stay as they are.

    Raises PlanError where clusters cannot be these islands, or no island has that name.
    """
    parallel = config.parallel
    if not parallel.is_mailbox or parallel.place is not None:
        return config, topology
    islands = clusters_of(config, topology)
    count, names = len(islands), tuple(map(name_of, islands))
    if parallel.quorum and parallel.quorum > count:
        problem = f"must be at most {count}, the islands of the run"
        raise PlanError("parallel.quorum", problem, found=parallel.quorum, fix="use fewer")
    if parallel.island is None:
        return config, topology
    numbers = [k for k, members in enumerate(islands) if parallel.island in (*members, names[k])]
    if not numbers:
        fix = f"use {', '.join(names)}"
        raise PlanError("parallel.island", "names no island", found=parallel.island, fix=fix)
    [number] = numbers
    own, train, folder = islands[number], config.train, config.run.dir.rstrip("/")
    place = PlaceConfig(names=names, number=number, steps=train.steps)
    paths = config.data.paths and {k: x for k, x in config.data.paths.items() if k in own}
    return (
        replace(
            config,
            run=replace(config.run, dir=f"{folder}/{names[number]}"),
            train=replace(
                train, steps=train.steps * count, global_batch=train.global_batch // count
            ),
            data=replace(config.data, paths=paths or None),
            parallel=replace(
                parallel,
                islands=(own,),
                mailbox=_whole(parallel.mailbox or f"{folder}/mailbox"),
                island=names[number],
                place=place,
            ),
        ),
        part_of(topology, own),
    )


def _whole(mailbox: str) -> str:
    """The place of a mailbox from any folder: the job goes on wherever its run folder is then."""
    return mailbox if places.is_url(mailbox) else os.path.abspath(mailbox)


def refuse_no_island(config: Config, topology: Topology) -> None:
    """Raises PlanError where a job is of no island, and the islands are jobs of their own."""
    if config.parallel.is_mailbox and config.parallel.place is None:
        names = [name_of(clusters) for clusters in clusters_of(config, topology)]
        raise PlanError(
            "parallel.island",
            "must name the island that this job trains: each is a job of its own",
            found="no island, and parallel.meet is mailbox",
            fix=f"add parallel.island={names[0]}, and start the others likewise: "
            + ", ".join(names[1:]),
        )
