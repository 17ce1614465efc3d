"""`launch export`: writes a run's model as a folder of Hugging Face's format."""

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax import job as jobs, units
from holmesjax.checkpoints import fetching, manifest, newest_whole
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import BYTES, ModelConfig, unread_settings
from holmesjax.config.data_sources import SOURCES
from holmesjax.data import tokenizer_files, tokenizer_paths
from holmesjax.data.tokenizer_files import FileTokenizer
from holmesjax.errors import CheckpointError, ConfigError, HolmesError
from holmesjax.hugging_face import export, folder, peft
from holmesjax.layer_specs import lora
from holmesjax.layer_specs.experts import BIAS
from holmesjax.layer_specs.model_layers import layers


def run(args: argparse.Namespace) -> int:
    run_dir, out = Path(args.run_dir), Path(args.out)
    max_bytes = _bytes(args.max_shard_size)
    export.refuse_full(out)
    job_config = jobs.load_config(run_dir)
    found = _checkpoint(run_dir, args.step)
    model = ModelConfig(**found.settings["model"])
    _refuse_other_parts(args, model)
    kept = run_dir / folder.KEPT
    base = replace(model, lora=None, fp8=None)
    if base.experts is not None and base.experts.bias_rate:  # which go out as fixed ones
        base = replace(base, experts=replace(base.experts, biased=True))
    config = export.config_of(base, kept if kept.is_dir() else None, args.family, args.dtype)
    fetching.bring_of_url(found, lambda line: print(line, flush=True))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed
    checkpoint = importlib.import_module("holmesjax.checkpoints.restoring")
    restored = checkpoint.restore_layers(found, model, ema=args.ema)
    values = _layers(restored, model, merges=args.merge)
    if args.format == "peft":
        peft.write(out, model, config["model_type"], values, job_config.model.hf)
        print(f"exported    step {found.step}: adapters of a {config['model_type']} in float32")
        print(f"written     {_files(out, [peft.WEIGHTS])}")
        return 0
    names = export.write(
        out,
        config,
        base,
        values,
        max_bytes=max_bytes,
        kept=kept if kept.is_dir() else None,
        tokenizer=_tokenizer(run_dir, found, kept),
    )
    whose = f"the average of step {found.step}" if args.ema else f"step {found.step}"
    print(f"exported    {whose} as a {config['model_type']} in {config['dtype']}")
    print(f"written     {_files(out, names)}")
    return 0


def _files(out: Path, weights: Sequence[str]) -> str:
    """A folder that was written, and what is in it: the files with weights, and all others."""
    first = f"{len(weights)} files of weights" if len(weights) > 1 else weights[0]
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    return f"{out}: {', '.join([first, *sorted(names - {*weights})])}"


def _tokenizer(run_dir: Path, found: Checkpoint, kept: Path) -> FileTokenizer | None:
    """The tokenizer of a checkpoint; that which came with the weights, if its data have none."""
    data = unread_settings.section_of_begun_run("data", found.settings["data"])
    if data.tokenizer != BYTES:
        own = tokenizer_files.copy_of_run(run_dir, data.tokenizer, found.path)
        return tokenizer_files.of_run(data, own)
    if SOURCES[data.source].has_tokens:
        return tokenizer_files.of_bytes()
    return tokenizer_files.load(kept) if tokenizer_paths.has_one(kept) else None


def _refuse_other_parts(args: argparse.Namespace, model: ModelConfig) -> None:
    """Raises ConfigError unless the run has the parts that are asked for."""
    if model.lora is None and (args.format == "peft" or args.merge):
        where = "--merge" if args.merge else "--format"
        problem, fix = "is for a run with adapters", "leave it out: the model goes out as it is"
        raise ConfigError(where, problem, found="a run without model.lora", fix=fix)
    if args.format == "peft" and args.merge:
        problem = "cannot be set beside --format peft, which writes adapters alone"
        raise ConfigError("--merge", problem, found="both", fix="leave one of the two out")
    if model.lora is not None and args.format == "hf" and not args.merge:
        problem = "has no place for the adapters of the run"
        fix = "add --merge, or write the adapters alone with --format peft"
        raise ConfigError("--format hf", problem, found="a run with model.lora", fix=fix)


def _layers(
    restored: Iterator[tuple[str, Any]], model: ModelConfig, *, merges: bool
) -> Iterator[export.Layer]:
    """The parameters of each layer by their stated names; no layer is kept here."""
    for layer, arrays in restored:
        named = _by_name(layer, model, arrays)
        arrays.clear()
        yield layer, lora.merged(layers(model)[layer], named) if merges else named
        named.clear()


def _by_name(layer: str, model: ModelConfig, own: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The parameters of a layer by their stated names, of a nested dict.

    Parameters that a step changes without training them belong to the run, and are left out. Of
    them all biases of an expert are one.
    """
    found = {}
    for parameter in (stated for stated in layers(model)[layer].parameters if not stated.changes):
        node: Any = own
        for name in parameter.path:
            node = node[name]
        found[parameter.name] = np.asarray(node)
    router = own.get("router", {})
    if model.experts is not None and ("bias_E" in router or "steps_E" in router):
        steps_E = np.asarray(router.get("steps_E", 0), np.float32)
        of_steps_E = np.float32(model.experts.bias_rate) * steps_E
        found[BIAS] = np.asarray(router.get("bias_E", 0), np.float32) + of_steps_E
    return found


def _checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    """The checkpoint after a step, or the newest that is whole."""
    if step is None:
        warn = lambda text: print(text, flush=True)
        if newest := newest_whole.find(run_dir, warn, fetches=True):
            return newest
        fix = f"train it first: python -m launch train {run_dir}"
        raise CheckpointError(str(run_dir), "has no checkpoint", found="none", fix=fix)
    known = manifest.find(run_dir)
    for checkpoint in known:
        if checkpoint.step == step:
            manifest.verify(checkpoint)
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(known)) or "none"
    problem = f"has no checkpoint after step {step}"
    raise CheckpointError(str(run_dir), problem, found=steps, fix="name one of them: --step N")


def _bytes(text: str) -> int:
    try:
        size = int(units.parse(text, "B"))
    except HolmesError as error:
        where = "--max-shard-size"
        raise ConfigError(where, error.problem, found=text, fix=error.fix) from None
    if size < 1:
        raise ConfigError("--max-shard-size", "must be above 0", found=text, fix="write it as 5GB")
    return size
