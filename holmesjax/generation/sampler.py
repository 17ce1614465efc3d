"""A trained model that continues texts, several at once.

Dims: see `models/transformer.py`. Each text is what it would be alone: rows of a batch are
independent, and row r draws as a single text with the seed + r. When a text outgrows the model's
context, the caches are filled again with its later half; when it outgrows the length up to which
rotary positions have other frequencies, with all of it.
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from holmesjax import job as jobs
from holmesjax.checkpoints import fetching, newest_whole
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import BYTES, ModelConfig, unread_settings
from holmesjax.config.rotary import switch_length
from holmesjax.data import sources, tokenizer_files
from holmesjax.data.sources import Tokenizer
from holmesjax.errors import CheckpointError, ConfigError, DamagedError
from holmesjax.generation.decoder import Decoder, ModelPart, bucket, on_devices
from holmesjax.generation.sampling import Sampling, draw
from holmesjax.generation.stop_strings import StopStrings
from holmesjax.hugging_face import folder
from holmesjax.models.layer import Params, seed_key, source_of_values
from holmesjax.parallel import platforms
from holmesjax.parallel.mesh import build_meshes

EndedBy = Literal["end", "stop", "length"]


@dataclass(kw_only=True)
class Continuation:
    """The text that follows one prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended_by: EndedBy = "length"  # an end token, a stop string, or the number of tokens


@dataclass(kw_only=True)
class Rate:
    """The time of a generation."""

    num_prompt: int  # tokens of all prompts
    num_first: int = 0  # the first two tokens of each row: programs are compiled for them
    first_s: float = 0.0
    num_rest: int = 0  # all other tokens
    rest_s: float = 0.0

    def add(self, num_tokens: int, is_first: bool, seconds: float) -> None:
        """Counts a step: a token of each of some rows."""
        if is_first:
            self.num_first, self.first_s = self.num_first + num_tokens, self.first_s + seconds
        else:
            self.num_rest, self.rest_s = self.num_rest + num_tokens, self.rest_s + seconds

    def __str__(self) -> str:
        found = (
            f"{self.num_prompt} tokens of prompt and the first {self.num_first} in "
            f"{self.first_s:.2f} s, programs compiled"
        )
        if self.num_rest:
            rate = self.num_rest / self.rest_s
            found += f"; {self.num_rest} more in {self.rest_s:.2f} s: {rate:,.1f} tokens/s"
        return found


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A trained model that continues texts."""

    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.decoder.model

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        warn: Callable[[str], None] = warnings.warn,
        *,
        as_planned: bool = False,
        devices: int = 1,
        ema: bool = False,
    ) -> "Sampler":
        """Loads the newest whole checkpoint of a run; writes nothing, unless the run is at a URL.

        Args:
          run_dir: the folder of the run.
          warn: takes what is wrong with newer ones.
          as_planned: whether the layers lie on the stages of the run's plan, each cut over its
            mesh, all in this process.
          devices: otherwise, how many devices of this process have all of them together.
          ema: whether the weights are the average that the run keeps.
        """
        jobs.load_config(run_dir)
        known: dict[Path, DamagedError] = {}
        while True:
            found = newest_whole.find(run_dir, warn, known=known, fetches=True)
            if found is None:
                fix = f"train it first: python -m launch train {run_dir}"
                raise CheckpointError(str(run_dir), "has no checkpoint", found="none", fix=fix)
            model = ModelConfig(**found.settings["model"])
            refuse_own_model(model)
            tokenizer = tokenizer_of(Path(run_dir), found)
            parts = _planned(run_dir) if as_planned else on_devices(model, devices)
            try:
                fetching.bring_of_url(found, warn)
                decoder = Decoder.restored(found, model, parts, ema=ema)
            except DamagedError as error:
                known[found.path] = error
                continue
            return cls(decoder=decoder, tokenizer=tokenizer)

    @classmethod
    def of_hugging_face(cls, path: str | Path, *, devices: int = 1) -> "Sampler":
        """Reads a folder of Hugging Face's format, layer by layer, onto some devices."""
        model = ModelConfig(**folder.settings_of(str(path)))
        tokenizer = tokenizer_files.load(path)
        tokenizer_files.check_vocabulary(model, tokenizer.num_used)
        values = source_of_values(replace(model, hf=str(path)), seed=0)
        decoder = Decoder.built(model, on_devices(model, devices), values)
        return cls(decoder=decoder, tokenizer=tokenizer)

    @classmethod
    def of(cls, model: ModelConfig, params: Params, tokenizer: Tokenizer) -> "Sampler":
        """A sampler of parameters in memory, on the first device."""
        parts = on_devices(model)
        return cls(decoder=Decoder(model=model, parts=parts, params=params), tokenizer=tokenizer)

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        ends: Sequence[int] | None = None,
        show: Callable[[int, str], None] = lambda row, piece: None,
    ) -> tuple[list[Continuation], Rate]:
        """Continues several texts at once.

        Args:
          prompts: texts, or their tokens.
          max_tokens: of each continuation.
          sampling: the rule; row r draws with its seed + r.
          stop: strings before which a text ends; also special tokens, which are no text.
          ends: the tokens that end a text; None: those of the tokenizer.
          show: takes the number of a row and its text as it comes.
        """
        known = [encoded(self.tokenizer, prompt) for prompt in prompts]
        ended_by, strings = _stops(self.tokenizer, stop, ends)
        rows = [_Row(self.tokenizer, tokens, strings, ended_by) for tokens in known]
        rate = Rate(num_prompt=sum(map(len, known)))
        before_s = time.perf_counter()
        is_over = lambda i: rows[i].is_over
        for step, tokens in enumerate(self.tokens(known, max_tokens, sampling, is_over)):
            alive = [i for i, row in enumerate(rows) if not row.is_over]
            for i in alive:
                if piece := rows[i].push(tokens[i]):
                    show(i, piece)
            now_s = time.perf_counter()
            rate.add(len(alive), step < 2, now_s - before_s)
            before_s = now_s
        for i, row in enumerate(rows):
            if piece := row.finish():
                show(i, piece)
        return [row.found for row in rows], rate

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        is_over: Callable[[int], bool] = lambda row: False,
    ) -> Iterator[list[int]]:
        """The next token of each row, again and again.

        Args:
          prompts: the tokens of each row; one at least.
          max_tokens: how often.
          sampling: the rule.
          is_over: tells whether a row needs no more tokens; the tokens of such a row mean nothing.
        """
        context, switch = self.model.context_length, switch_length(self.model.rotary_scaling)
        switched = None if switch is None else switch + 1
        known = [list(prompt)[-context:] for prompt in prompts]
        length = cache_length(known, max_tokens, context)
        seeds = ((sampling.seed + row) % 2**63 for row in range(len(known)))
        key_Bk = np.stack([jax.random.key_data(seed_key(seed)) for seed in seeds])
        num_tokens = self.tokenizer.num_tokens
        caches, logits_BLV = self._filled(known, length) if max_tokens else ([], None)
        for i in range(max_tokens):
            drawn_B = (
                None if logits_BLV is None else _choose(logits_BLV, key_Bk, i, sampling, num_tokens)
            )
            token_B = self.decoder.shared(drawn_B)
            yield token_B.tolist()
            alive = [row for row in range(len(known)) if not is_over(row)]
            if not alive or i + 1 == max_tokens:
                return
            for row in alive:
                known[row].append(int(token_B[row]))
            if any(len(known[row]) in (switched, context + 1) for row in alive):
                half = max(context // 2, 1)
                known = [
                    token_L[-half:] if len(token_L) > context else token_L for token_L in known
                ]
                caches, logits_BLV = self._filled(known, length)
                continue
            last_B1 = np.array([[len(token_L) - 1] for token_L in known], np.int32)
            new_B1 = np.array([[token_L[-1]] for token_L in known], np.int32)
            logits_BLV, caches = self.decoder.extend(caches, new_B1, last_B1)

    def _filled(self, known: Sequence[Sequence[int]], length: int) -> tuple[list, jax.Array | None]:
        """Caches with the tokens of all rows, and the logits after the last of each."""
        size = bucket(max(map(len, known)), length)
        token_BL = np.zeros((len(known), size), np.int32)
        position_BL = np.full((len(known), size), -1, np.int32)
        for row, token_L in enumerate(known):
            token_BL[row, : len(token_L)] = token_L
            position_BL[row, : len(token_L)] = np.arange(len(token_L))
        wanted_B = np.array([len(token_L) - 1 for token_L in known], np.int32)
        caches = self.decoder.empty_caches(len(known), length)
        logits_B1V, caches = self.decoder.extend(caches, token_BL, position_BL, wanted_B)
        return caches, logits_B1V


def cache_length(known: Sequence[Sequence[int]], max_tokens: int, context: int) -> int:
    """The tokens that caches are made for, of texts with so many more tokens."""
    return bucket(min(max(map(len, known)), context) + max_tokens, context)


@functools.partial(jax.jit, static_argnames=("sampling", "num_tokens"))
def _choose(
    logits_B1V: jax.Array, key_Bk: jax.Array, i: int, sampling: Sampling, num_tokens: int
) -> jax.Array:
    """Token i of each row; int32 [B]."""

    def choose(logits_V: jax.Array, key: jax.Array) -> jax.Array:
        return draw(logits_V, jax.random.fold_in(key, i), sampling, num_tokens)

    return jax.vmap(choose)(logits_B1V[:, 0], jax.random.wrap_key_data(key_Bk))


class _Row:
    """One text as it grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        strings: Sequence[str],
        ends: Mapping[int, EndedBy],
    ):
        self.found = Continuation()
        self._ends, self._stream = ends, tokenizer.decode_stream(prompt)
        self._stop = StopStrings(strings)

    @property
    def is_over(self) -> bool:
        """Whether no more of its tokens are wanted."""
        return self.found.ended_by != "length"

    def push(self, token: int) -> str:
        """Takes a token; returns what is certain of the text."""
        self.found.tokens.append(token)
        if token in self._ends:
            self.found.ended_by = self._ends[token]
            return ""
        return self._out(self._stream.push(token))

    def finish(self) -> str:
        """The end of the text."""
        if self._stop.is_found:
            return ""
        out = self._out(self._stream.rest())
        rest = self._stop.rest()
        self.found.text += rest
        return out + rest

    def _out(self, piece: str) -> str:
        out = self._stop.push(piece)
        self.found.text += out
        if self._stop.is_found:
            self.found.ended_by = "stop"
        return out


def _stops(
    tokenizer: Tokenizer, stop: Sequence[str], own: Sequence[int] | None
) -> tuple[dict[int, EndedBy], list[str]]:
    """The tokens that end a text, and the strings that do.

    Raises ConfigError for a string with a special token in it, which would never come.
    """
    marks = tokenizer.marks
    for text in stop:
        if text not in marks and (inside := [mark for mark in marks if mark in text]):
            problem = "holds a special token, which is no part of a text"
            fix = f"name the token alone: --stop {inside[0]!r}"
            raise ConfigError("--stop", problem, found=repr(text), fix=fix)
    ends: dict[int, EndedBy] = {marks[text]: "stop" for text in stop if text in marks}
    ends |= dict.fromkeys(tokenizer.ends if own is None else own, "end")
    return ends, [text for text in stop if text not in marks]


def encoded(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """The tokens of a prompt, which may be a text."""
    return tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else list(prompt)


def tokenizer_of(run_dir: Path, found: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint, from the copy in the run folder."""
    data = unread_settings.section_of_begun_run("data", found.settings["data"])
    if data.tokenizer != BYTES:
        own = tokenizer_files.copy_of_run(run_dir, data.tokenizer, found.path)
        data = replace(data, tokenizer=str(own))
    return sources.module_of(data).tokenizer(data)


def _planned(run_dir: str | Path) -> list[ModelPart]:
    """The chunks of a run's plan on the devices of this process."""
    job = jobs.load_saved(run_dir)
    os.environ.update(job.environment(os.environ))  # before JAX asks for a device
    topology, plan = job.topology, job.plan
    kinds, count = topology.device_kinds, topology.num_devices
    platforms.use_devices(kinds, count, rehearse=job.config.run.rehearse)
    meshes = build_meshes(plan, jax.devices())
    return [
        ModelPart(layers=names, mesh=meshes[stage]) for stage, names in plan.pipelines[0].chunks
    ]


def refuse_own_model(model: ModelConfig) -> None:
    """Raises ConfigError for layers that may keep what a cache of keys does not hold."""
    if model.module is not None:
        problem = "cannot be sampled: only the built-in layers have a cache of keys"
        fix = "compute its outputs from Python, with checkpoint.restore_params"
        raise ConfigError("model.module", problem, found=model.module, fix=fix)
