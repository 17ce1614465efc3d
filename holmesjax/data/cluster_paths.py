"""The paths of the data in each cluster, which may hold the same files in another place."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from holmesjax.config import Config, DataConfig
from holmesjax.data import sources
from holmesjax.errors import ConfigError, DataError
from holmesjax.files import schema


def here(data: DataConfig, cluster: str) -> DataConfig:
    """The section `data` with the paths that it has in a cluster."""
    begins = (data.paths or {}).get(cluster)
    if begins is None:
        return data
    entries: dict[str, Any] = {
        name: tuple(
            dataclasses.replace(entry, corpus=_moved(entry.corpus, begins)) for entry in known
        )
        for name in ("mixture", "validation")
        if (known := getattr(data, name)) is not None
    }
    corpus, tokenizer = (_moved(path, begins) for path in (data.corpus, data.tokenizer))
    return dataclasses.replace(data, corpus=corpus, tokenizer=tokenizer, paths=None, **entries)


def _moved(path: str, begins: Mapping[str, str]) -> str:
    """A path with another beginning, the longest that it has.

    >>> begins = {"/data": "/mnt", "/data/web": "/nvme"}
    >>> _moved("/data/web/a", begins), _moved("/data/b", begins), _moved("/data2", begins)
    ('/nvme/a', '/mnt/b', '/data2')
    """
    for begin in sorted(begins, key=len, reverse=True):
        if f"{path}/".startswith(f"{begin.rstrip('/')}/"):
            return begins[begin].rstrip("/") + path[len(begin.rstrip("/")) :]
    return path


def check(config: Config, clusters: Sequence[str]) -> None:
    """Raises ConfigError if a setting is of a cluster that is not there, or moves no path."""
    data = config.data
    entries = [*(data.mixture or ()), *(data.validation or ())]
    paths = [data.corpus, data.tokenizer, *(entry.corpus for entry in entries)]
    for name, begins in (data.paths or {}).items():
        if name not in clusters:
            problem, fix = "names no cluster of the topology", schema.near(name, clusters)
            raise ConfigError("data.paths", problem, found=name, fix=fix)
        for begin in begins:
            if not any(_moved(path, {begin: ""}) != path for path in paths):
                problem = f"begins no path of the section data, for cluster {name}"
                fix = f"name the beginning of one: {', '.join(paths)}"
                raise ConfigError("data.paths", problem, found=begin, fix=fix)


def look(config: Config, clusters: Sequence[str]) -> None:
    """Looks whether this machine has the data of one of these clusters. Raises HolmesError."""
    views = [here(config.data, cluster) for cluster in clusters]
    refusals = []
    for number, view in enumerate(views):
        if view in views[:number]:
            continue
        try:
            sources.module_of(view).look(dataclasses.replace(config, data=view))
            return
        except DataError as error:
            refusals.append(error)
    raise refusals[0]
