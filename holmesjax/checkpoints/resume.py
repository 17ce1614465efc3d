"""Finds where a run goes on, and says what has changed since. Does not import JAX.

A run that resumes goes on as if it had never stopped. A change of the data, of their order or of
the model breaks that, so it is refused unless the user allows it by name. What was allowed is kept
in the run folder: the same start may be repeated, by a scheduler say, with or without the option.
Every other change is told.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from holmesjax.checkpoints import island_states, newest_whole, second_reading, skipped_data
from holmesjax.checkpoints.changed_settings import Change, changes_since, show
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import DataConfig, OptimizerConfig, TrainConfig, unread_settings
from holmesjax.errors import (
    CheckpointError,
    ConfigError,
    LostDataError,
    SpikeError,
    raise_if_passing,
)
from holmesjax.files import json_text, run_folder, schema
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts import computing
from holmesjax.job import Job
from holmesjax.liveness.lease import Lease
from holmesjax.optimizers.learning_rates import learning_rate, step_tokens

# May change if they are allowed by name; of the model only what no array depends on.
ALLOWABLE = (
    *(f"data.{field.name}" for field in dataclasses.fields(DataConfig)),
    "train.seed",
    "train.global_batch",
    "train.rampup",
    "model.rotary_base",
    "model.window_rotary_base",
    "model.rotary_scaling",
    "model.z_loss_multiplier",
)
OPTIMIZER = ("optimizer.name", "optimizer.function")  # which arrays there are
# Which files are read, how, and of which split they are.
FILES = (
    *("data.corpus", "data.source", "data.pattern", "data.validation_fraction"),
    *("data.mixture", "data.validation"),
)
SHOWN = 12  # digits of a digest
# By which a learning rate changes; the batches count for a schedule by tokens.
RATE = (
    "train.steps",
    *("optimizer.learning_rate", "optimizer.schedule", "optimizer.schedule_by"),
    *("optimizer.warmup_steps", "optimizer.warmup_tokens"),
    *("optimizer.decay_steps", "optimizer.decay_tokens", "optimizer.final_fraction"),
)
BATCHES = ("train.global_batch", "train.rampup", "model.context_length")


class _Allowed(NamedTuple):
    """A change that the user has allowed by name, for going on from step `step` or before it."""

    step: int
    name: str
    was: Any
    now: Any

    def covers(self, change: Change, step: int) -> bool:
        return step <= self.step and change[:3] == self[1:]  # whatever its words


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a session of a run: from its newest checkpoint, or from nothing."""

    job: Job
    checkpoint: Checkpoint | None = None
    changes: tuple[Change, ...] = ()  # since the checkpoint
    allow: Sequence[str] = ()  # names of settings that may differ
    skipped: Sequence[Skipped] = ()  # data that the run leaves out

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def sequences(self) -> int:
        """Sequences consumed."""
        return self.checkpoint.sequences if self.checkpoint else 0

    def describe(self) -> list[str]:
        """Lines for the console before the first step."""
        left_out = [f"  leaves out {skipped_part}" for skipped_part in self.skipped]
        if not self.checkpoint:
            return left_out
        lines = [f"resuming after step {self.step}", *(f"  {change}" for change in self.changes)]
        lines += [f"  {line}" for line in self._rate_change(self.checkpoint)]
        outer = self.job.config.parallel.outer_rule
        clusters = island_states.clusters_of(self.job.plan)
        shares = self.job.plan.batch_shares
        lines += island_states.describe(self.checkpoint, clusters, outer, shares)
        return lines + left_out

    def _rate_change(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the line about a changed learning rate of the next step, if it has changed."""
        saved, config = checkpoint.settings, self.job.config
        before = unread_settings.section_of_begun_run("train", saved["train"])
        optimizer = unread_settings.section_of_begun_run("optimizer", saved["optimizer"])
        was_steps, now_steps = before.steps, config.train.steps
        length = saved["model"]["context_length"]
        was = _rate(optimizer, before, length, self.step)
        now = _rate(config.optimizer, config.train, config.model.context_length, self.step)
        if math.isclose(was, now, rel_tol=1e-6):
            return []
        names = RATE + (BATCHES if config.optimizer.schedule_by == "tokens" else ())
        reasons = [change for change in self.changes if change.name in names]
        why = ", ".join(f"{c.name} {show(c.was)} -> {show(c.now)}" for c in reasons)
        if [change.name for change in reasons] == ["train.steps"]:
            stretches = "stretches" if now_steps > was_steps else "shortens"
            why += f" {stretches} the {config.optimizer.schedule} schedule"
        return [f"learning rate of step {self.step + 1}: {_show_rates(was, now)} ({why})"]

    def finished(self) -> list[str]:
        """Lines for the console where there is nothing left to do."""
        optimizer, train = self.job.config.optimizer, self.job.config.train
        length, steps, longer = self.job.config.model.context_length, train.steps, 2 * self.step
        last = _rate(optimizer, train, length, self.step - 1)
        following = _rate(optimizer, dataclasses.replace(train, steps=longer), length, self.step)
        lines = [
            f"finished: {self.step} of {steps} steps are done",
            f"to train longer: python -m launch train {self.job.run_dir} train.steps={longer}",
        ]
        if math.isclose(last, following, rel_tol=1e-6):
            return lines
        decays = ("decay_steps", "decay_tokens")
        rest = [f"optimizer.{name}=null" for name in decays if getattr(optimizer, name)]
        rest += ["optimizer.warmup_steps=0"] if optimizer.warmup_steps > self.step else []
        consumed = train.sequences_after(self.step) * length
        rest += ["optimizer.warmup_tokens=null"] * ((optimizer.warmup_tokens or 0) > consumed)
        rate = f"{last:.6g}" if last else "RATE"
        settings = ["optimizer.schedule=constant", f"optimizer.learning_rate={rate}", *rest]
        return [
            *lines,
            f"  that stretches the {optimizer.schedule} schedule: the learning rate of step "
            f"{self.step + 1} is {_show_rates(last, following)}",
            f"  to go on with {f'{last:.1e}' if last else 'another'}, add {' '.join(settings)}",
        ]

    def permit(self, changes: Sequence[Change]) -> None:
        """Refuses changes that nobody has allowed, and keeps the others in the run folder.

        Raises CheckpointError with all that are refused.
        """
        known = _allowed(self.job.run_dir)
        missing = [
            change
            for change in changes
            if change.name not in self.allow
            and not any(entry.covers(change, self.step) for entry in known)
        ]
        if missing:
            raise CheckpointError(
                str(self.checkpoint.path if self.checkpoint else self.job.run_dir),
                "has other settings; with these the run would not go on as if it had never stopped",
                found=", ".join(map(str, missing)),
                fix="use its own settings, or another run.dir; to go on in spite of it, add "
                "--allow " + ",".join(change.name for change in missing),
            )
        new = [_Allowed(self.step, *change[:3]) for change in changes if change.name in self.allow]
        if new := [entry for entry in new if entry not in known]:
            path = self.job.run_dir / run_folder.ALLOWED
            content = [entry._asdict() for entry in (*known, *new)]
            write_whole(path, json.dumps(content, indent=1) + "\n")

    def check_data(self, digests: Mapping[str, str]) -> list[str]:
        """Refuses other data than the checkpoint's. Returns the lines about allowed changes.

        Args:
          digests: of each split and of the order of the data, as they were read now.

        Raises LostDataError: another start may find them as they were.
        """
        if not self.checkpoint or not self.checkpoint.step:
            return []
        saved = self.checkpoint.manifest["data"]
        differ = [name for name in digests if digests[name] != saved.get(name)]
        if any(change.name in FILES for change in self.changes):  # permitted: the files follow
            differ = [name for name in differ if _is_order(name) and name in saved]
        if not differ:
            return []
        was, now = (
            ", ".join(f"{name} {digests_of_one.get(name, '')[:SHOWN]}" for name in differ)
            for digests_of_one in (saved, digests)
        )
        change = Change("data.corpus", was, now)
        try:
            self.permit([change])
        except CheckpointError as error:
            if all(map(_is_order, differ)):  # of the code
                raise
            raise LostDataError.of(error) from None  # a file may be cut for a moment
        return [f"  {change}"]


def find(
    job: Job,
    allow: str | Iterable[str],
    warn: Callable[[str], None],
    known: newest_whole.Damaged = MappingProxyType({}),
    *,
    owner: Lease | None = None,
    pause: Callable[[float], object] = time.sleep,
    fetches: bool = False,
) -> Start:
    """Finds where the job goes on; the run folder must be the caller's (`lease`).

    Args:
      allow: what `--allow` said, each time.
      warn: takes what is wrong with newer checkpoints.
      known: for `newest_whole.find`.
      pause, fetches: for `newest_whole.find`.
      owner: of the run; without it nothing is renamed or refused for what is gone.

    Raises:
      CheckpointError: all checkpoints are damaged, the newest is gone, or settings differ that may
        not.
      PeerError: a checkpoint cannot be read by this process, or not now.
      ConfigError: `allow` names what needs no permission.
    """
    check = owner.check if owner else lambda: None
    checkpoint = newest_whole.find(
        job.run_dir,
        warn,
        move=owner.move if owner else None,
        known=known,
        check=check,
        confirm=functools.partial(second_reading.confirm, pause=pause, say=warn),
        pause=pause,
        fetches=fetches,
        has_partner=fetches and job.config.checkpoint.partner,
    )
    job.note_own_sources()
    changes = tuple(changes_since(checkpoint, job)) if checkpoint else ()
    start = Start(
        job=job,
        checkpoint=checkpoint,
        changes=changes,
        allow=names_of(allow),
        skipped=skipped_data.read(job.run_dir),
    )
    allowable = _allowable(job)
    for what, never in (
        ("model", [c for c in changes if c.name.startswith("model.") and c.name not in allowable]),
        ("optimizer", [c for c in changes if c.name in OPTIMIZER and start.step]),
    ):
        if never:
            raise CheckpointError(
                str(checkpoint and checkpoint.path),
                f"is of another {what}",
                found=", ".join(map(str, never)),
                fix=f"use the {what}'s own settings, or another run.dir",
            )
    _refuse_useless_permissions(start)
    check()
    # Before the first step nothing has been done that another setting would have done otherwise.
    start.permit([change for change in changes if change.name in allowable and start.step])
    return start


def roll_back(
    job: Job,
    spike: SpikeError,
    say: Callable[[str], None],
    owner: Lease,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Notes that the data from the newest checkpoint to a spike are left out; `find` goes back.

    Args:
      owner: of the run.
      pause: for `newest_whole.find`.

    Raises FatalError where the run has gone back there too often.
    """
    confirm = functools.partial(second_reading.confirm, pause=pause, say=say)
    checkpoint = newest_whole.find(
        job.run_dir,
        say,
        move=owner.move,
        check=owner.check,
        confirm=confirm,
        pause=pause,
        fetches=True,
    )
    owner.check()
    step = checkpoint.step if checkpoint else 0
    found = skipped_data.add(job.run_dir, job.config.train, spike.step, step)
    say(
        f"spike       {spike.where}, {spike.found}: going back to step {step}; {found} are left out"
    )


def _refuse_useless_permissions(start: Start) -> None:
    """Raises ConfigError where `allow` names what has not changed, or may change without it."""
    useful = {change.name for change in start.changes} & set(_allowable(start.job))
    used = {entry.name for entry in _allowed(start.job.run_dir)}  # by a start before this one
    if start.checkpoint:
        used.add("data.corpus")  # its files may have changed, which is seen when they are read
    if useless := [name for name in start.allow if name not in useful | used]:
        fix = f"write --allow {','.join(sorted(useful))}" if useful else "leave it out"
        problem = "names what has not changed, or may change without it"
        known = (*_allowable(start.job), *computing.NAMES)
        if useless[0] not in known:
            problem = "has no such name"
            fix += f"; {schema.near(useless[0], known)}; or a flag of XLA, as in "
            fix += "--allow=--xla_gpu_autotune_level"
        raise ConfigError("--allow", problem, found=", ".join(useless), fix=fix)


def _rate(
    optimizer: OptimizerConfig, train: TrainConfig, context_length: int, update: int
) -> float:
    """The learning rate of update n = 0, 1, ... of a run with these settings."""
    tokens = step_tokens(train, context_length)
    return float(learning_rate(optimizer, train.steps, update, tokens=tokens))


def names_of(allow: str | Iterable[str]) -> list[str]:
    """The settings that `--allow` names, or several of it.

    Raises ConfigError for a text without a name.

    >>> names_of(["train.seed, data.corpus", "data.pattern"])
    ['train.seed', 'data.corpus', 'data.pattern']
    """
    texts = [allow] if isinstance(allow, str) else allow
    found = []
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        fix = 'write allow=["data.corpus"]'
        raise ConfigError("allow", "must be names of settings", found=repr(allow), fix=fix)
    for text in texts:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            fix = "name what may differ, as in --allow train.seed,source, or leave it out"
            raise ConfigError("--allow", "names nothing", found=repr(text), fix=fix)
        found += names
    return found


def _allowable(job: Job) -> tuple[str, ...]:
    """Settings that may change if allowed by name: only learned positions are an array."""
    more = ("model.context_length",) if job.config.model.positions == "rotary" else ()
    return (*ALLOWABLE, *more)


def _allowed(run_dir: Path) -> list[_Allowed]:
    path = run_dir / run_folder.ALLOWED
    try:
        allowed = [_Allowed(**entry) for entry in json_text.read(path)]
        if all(isinstance(a.step, int) and isinstance(a.name, str) for a in allowed):
            return allowed
        raise ValueError("a step that is no number, or a name that is no text")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise_if_passing(error)
        problem = "cannot be read, and has the changes that were permitted"
        fix = f"copy it back from elsewhere, or remove {path} and give --allow again"
        raise CheckpointError(str(path), problem, found=error, fix=fix) from None


def _is_order(name: str) -> bool:
    """Whether a digest of the data is of an order, which the code alone decides."""
    return name.startswith("order")


def _show_rates(was: float, now: float) -> str:
    """Both, with as many digits as it takes to tell them apart."""
    digits = next(n for n in range(1, 17) if f"{was:.{n}e}" != f"{now:.{n}e}")
    return f"{was:.{digits}e} -> {now:.{digits}e}"
