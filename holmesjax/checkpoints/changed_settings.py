"""The settings that a checkpoint keeps of its run, and what has changed since. No JAX."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from holmesjax import job as jobs
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import (
    BYTES,
    Config,
    OuterConfig,
)
from holmesjax.data import tokenizer_files
from holmesjax.errors import HolmesError
from holmesjax.job import Job
from holmesjax.plan import pins
from holmesjax.plan.meeting_steps import steps_of
from holmesjax.plan.plan import Plan

# Sections of the config that shape the numbers. Parallelism does by way of the plan, which has a
# hash; `distributed`, `checkpoint`, `log` and these settings do not.
SECTIONS = ("run", "train", "model", "data", "optimizer", "kernels")
LOGISTICS = (
    "run.dir",
    "train.log_every_s",
    "train.profile_steps",
    "train.eval_every",
    "train.eval_ema",
    "model.hf",
    "data.paths",
)
OUTER = ("rate", "momentum", "nesterov")  # of the rule of earlier versions
# The setting of `parallel` that changes the order of sums and is not in the plan; its default.
OF_EXPERTS: dict[str, Any] = {"expert_placement": "number"}
# Islands take turns at its corpora, in their order, and by their shares of the batch.
BY_ISLAND = "data.mixture_by_island"
# Of islands in earlier versions.
WHOLE_MEETINGS = {"fragments": 1, "delay": 0, "blend": 1.0, "shares": None}


class Change(NamedTuple):
    """A setting that the checkpoint has otherwise."""

    name: str
    was: Any
    now: Any
    words: str = ""  # in place of both values in messages; empty: the values

    def __str__(self) -> str:
        return f"{self.name}: {self.words or f'{show(self.was)} -> {show(self.now)}'}"


def settings(job: Job) -> dict[str, dict[str, Any]]:
    """Settings that shape the numbers of a run, as a manifest keeps them, by section and name."""
    found = {
        section: {
            name: _read_back(value)
            for name, value in dataclasses.asdict(getattr(job.config, section)).items()
            if f"{section}.{name}" not in LOGISTICS
        }
        for section in SECTIONS
    }
    # Wherever their files are; without what earlier versions did not have.
    if (lora := found["model"]["lora"]) is not None:
        own = {name: x for name, x in lora.items() if name != "peft" and x is not None}
        found["model"]["lora"] = own
    if (fp8 := found["model"]["fp8"]) is not None:
        found["model"]["fp8"] = {name: x for name, x in fp8.items() if x}
    if (experts := found["model"]["experts"]) is not None and experts["latent_width"] is None:
        del experts["latent_width"]
    parallel = job.config.parallel
    now = {name: getattr(parallel, name) for name in OF_EXPERTS}
    if now != OF_EXPERTS:
        found["experts"] = now
    if parallel.has_islands:
        # Without what earlier versions did not have.
        outer, plain = dataclasses.asdict(parallel.outer_rule), dataclasses.asdict(OuterConfig())
        outer = {n: x for n, x in outer.items() if n in OUTER or x != plain[n]}
        outer["momentum"] = parallel.outer_rule.decay
        clusters = [[stage.cluster for stage in island.stages] for island in job.plan.islands]
        names = {"across": parallel.across, "islands": clusters, "every": parallel.meets_every}
        steps, share = steps_of(parallel), parallel.global_share
        streaming = {"fragments": steps.fragments, "delay": steps.delay, "blend": share}
        shares = list(job.plan.batch_shares) if len({*job.plan.batch_shares}) > 1 else None
        found["parallel"] = {**names, "shares": shares, **streaming, "outer": outer}
    found["data"]["tokenizer"] = tokenizer_files.identity(job.config.data.tokenizer)
    return {**found, "versions": {**jobs.versions(), **job.own_sources}}


def changes_since(checkpoint: Checkpoint, job: Job) -> Iterable[Change]:
    """The settings that a checkpoint has otherwise, and the plan where it is another."""
    saved, wanted = checkpoint.settings, settings(job)
    if "parallel" in saved and "parallel" not in wanted:
        yield Change("parallel.across", saved["parallel"]["across"], job.config.parallel.across)
    kept, asked = ({**OF_EXPERTS, **each.pop("experts", {})} for each in ({**saved}, wanted))
    if "expert_chunks" in kept:  # of an earlier version, whose plans did not have them
        asked["expert_chunks"] = max(stage.expert_chunks for stage in job.plan.stages)
    for name, now in asked.items():
        if kept[name] != now:
            yield Change(f"parallel.{name}", kept[name], now)
    for section, values in wanted.items():
        for name, now in values.items():
            own = saved.get(section, {})
            if name not in own and now == _default(section, name):
                continue  # a setting that there was not yet
            if name not in own and section == "versions":
                continue  # which was not kept yet, or the code is new like its setting
            if (was := own.get(name)) != now:
                is_tokenizer = (section, name) == ("data", "tokenizer")  # of which these are hashes
                words = _tokenizers(job, was) if is_tokenizer else ""
                yield Change(f"{section}.{name}", was, now, words)
                is_turn = section == "parallel" and name in ("islands", "shares")
                if is_turn and job.config.data.mixture_by_island:
                    yield Change(BY_ISLAND, was, now, f"{name} {show(was)} -> {show(now)}")
    if (was := checkpoint.manifest["plan_hash"]) != (now := job.plan.hash()):
        yield Change("plan", was, now, _plans(job, was, now))


def _plans(job: Job, was: str, now: str) -> str:
    """Both plans by their hashes and by what differs in them; empty where the first is not kept."""
    for path in sorted(job.run_dir.glob(f"{Path(jobs.PLAN).stem}*.yaml")):
        with contextlib.suppress(HolmesError, OSError):  # a file that is no plan is told elsewhere
            before = Plan.load(path)
            if before.hash() == was and (differ := pins.differences(before, job.plan)):
                return f"{was} -> {now} ({', '.join(differ)})"
    return ""


def _tokenizers(job: Job, was: str | None) -> str:
    """The tokenizer that a checkpoint was made with, and that of the job, by where they are."""
    own = job.run_dir / tokenizer_files.FOLDER
    before = was if was == BYTES else str(own) if own.exists() else "another that is not here"
    return f"{before} -> {job.config.data.tokenizer}, whose files differ"


def _default(section: str, name: str) -> Any:
    """The value of a setting before there was one; MISSING without a default, and for versions."""
    if section == "parallel":  # of which a manifest has values in place of None
        return WHOLE_MEETINGS.get(name, dataclasses.MISSING)
    sections: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
    if section not in sections:
        return dataclasses.MISSING
    fields = dataclasses.fields(sections[section])
    return _read_back({field.name: field.default for field in fields}[name])


def _read_back(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if isinstance(value, dict):
        return {key: _read_back(entry) for key, entry in value.items()}
    return list(map(_read_back, value)) if isinstance(value, tuple) else value


def show(value: object) -> str:
    """The value of a setting, for a message."""
    if isinstance(value, dict):
        value = {name: entry for name, entry in value.items() if entry is not None}
    return value if isinstance(value, str) else json.dumps(value)
