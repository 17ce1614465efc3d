"""`launch import`: begins a run with the weights of a folder of Hugging Face's format."""

import argparse
import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from holmesjax import job as jobs, job_files
from holmesjax.checkpoints import committing, manifest, resume
from holmesjax.checkpoints.retention import Retention
from holmesjax.config import ModelConfig
from holmesjax.data import tokenizer_paths
from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.files import yaml_files
from holmesjax.hugging_face import folder, peft
from holmesjax.hugging_face.config_json import ConfigJson
from holmesjax.job import Job
from holmesjax.layer_specs.model_layers import layers
from holmesjax.liveness.lease import Lease

# Settings of a run without a run file. All of them may change until the first step.
SETTINGS = {
    "topology": "configs/topologies/one_node.yaml",
    "train": {"steps": 1000, "global_batch": 8},
    "data": {"corpus": "python-stdlib"},
    "optimizer": {"learning_rate": 1e-5},
}


def run(args: argparse.Namespace) -> int:
    source, run_dir = Path(args.hf_dir), Path(args.to)
    _refuse_used(run_dir)
    job = _load(args.run, source, run_dir, args.overrides)
    model, train = job.config.model, job.config.train
    weights = folder.open_weights(source, replace(model, lora=None, fp8=None))
    if model.lora is not None and model.lora.peft is not None:
        peft.open_adapters(Path(model.lora.peft), model)  # as a check
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed
    writing = importlib.import_module("holmesjax.checkpoints.writing")
    with Lease(run_dir) as held:
        keeps = Retention(run_dir, job.config.checkpoint, held.move, print)
        values = _layers(model, train.seed)
        dtypes = writing.Dtypes(train.param_dtype, train.compute_dtype)
        try:
            arrays, files = writing.save_layers(run_dir, model, dtypes, values)
        except BaseException:  # also an interrupt: what is written may be many gigabytes
            keeps.after_failure(0)
            raise
        job_files.save(job)  # last, so that a folder whose import has failed can be named again
        committing.commit(resume.Start(job=job), 0, arrays, files, data={})
        keeps.after_commit(0)
    num_parameters = sum(int(np.prod(array["shape"])) for array in arrays.values())
    print(f"imported    {num_parameters:,} parameters of {source}, {weights.dtype}")
    if dropouts := ConfigJson.load(source).dropouts:
        shares = ", ".join(f"{key} {share:g}" for key, share in dropouts.items())
        print(f"not used    {shares}: steps drop nothing out")
    missing = "" if args.run else " data.corpus=CORPUS topology=TOPOLOGY"
    print(f"train it    python -m launch train {run_dir}{missing}")
    return 0


def _layers(model: ModelConfig, seed: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The initial values of each layer: adapters are in no folder, unless one is named."""
    values = importlib.import_module("holmesjax.models.layer").source_of_values(model, seed)
    whole = lambda own: tuple((0, size) for size in own.shape)
    for layer, kind in layers(model).items():
        yield (
            layer,
            {
                parameter.name: values(parameter, layer, whole(parameter))
                for parameter in kind.parameters
            },
        )


def _refuse_used(run_dir: Path) -> None:
    if (run_dir / jobs.CONFIG).exists() or manifest.find(run_dir):
        problem, fix = "is the folder of a run that has begun", "name a new folder"
        raise ConfigError("--to", problem, found=run_dir, fix=fix)


def _load(run_file: str | None, source: Path, run_dir: Path, overrides: list[str]) -> Job:
    """The job of the run: the run file without its model, or `SETTINGS`, with the overrides."""
    own = [f"model.hf={json.dumps(str(source))}", f"run.dir={json.dumps(str(run_dir))}"]
    if tokenizer_paths.has_one(source):
        own.append(f"data.tokenizer={json.dumps(str(source))}")
    if run_file is not None:
        return jobs.load(run_file, [*own, *overrides])
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "import.yaml"
        path.write_text(yaml_files.to_text(SETTINGS), encoding="utf-8")
        try:
            return jobs.load(path, [*own, *overrides])
        except HolmesError as error:
            raise _of_no_file(error, path) from None


def _of_no_file(error: HolmesError, path: Path) -> HolmesError:
    """The error without a file that its reader has never seen."""
    if isinstance(error, Mistakes):
        return Mistakes([_of_no_file(mistake, path) for mistake in error.mistakes])
    where = re.sub(rf"{re.escape(str(path))}(:\d+)?: ", "", error.where)
    return type(error)(where, error.problem, found=error.found, fix=error.fix)
