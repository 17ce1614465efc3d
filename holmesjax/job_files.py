"""The files of a run folder that describe the run, written before its first step."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from holmesjax import config as configs
from holmesjax.config import BYTES
from holmesjax.data import tokenizer_files, tokenizer_marks, tokenizer_paths
from holmesjax.data.tokenizer_paths import GENERATION, OF_MODEL
from holmesjax.errors import DataError
from holmesjax.files import yaml_files
from holmesjax.files.whole_files import write_whole
from holmesjax.hugging_face import folder as hugging_face
from holmesjax.job import CONFIG, ENVIRONMENT, PLAN, TOPOLOGY, Job, versions
from holmesjax.topology import saving


def save_environment(job: Job, variables: Mapping[str, str]) -> None:
    """Writes what the processes have besides the files of `save`: variables and versions."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({**variables, **versions()}, sort_keys=False, width=1000)
    write_whole(job.run_dir / ENVIRONMENT, text)


def save(job: Job, done: int = 0) -> Callable[[], None]:
    """Writes the three files that describe the run into its folder, and its tokenizer.

    Earlier files that differ are kept, as `config.000120.yaml` where 120 steps were `done`.
    Before the first step they are not kept, since nothing was made with them. The function
    that is returned puts the earlier files back, for a start that is refused after all.
    """
    _save_tokenizer(job, done)
    before: dict[Path, bytes] = {}
    copies = []
    job.run_dir.mkdir(parents=True, exist_ok=True)
    if job.config.model.hf is not None:
        hugging_face.keep(Path(job.config.model.hf), job.run_dir)
    texts = {
        CONFIG: yaml_files.whole(configs.to_yaml(job.config)),
        TOPOLOGY: saving.to_yaml(job.topology),
        PLAN: job.plan.to_yaml(),
    }
    for name, text in texts.items():
        path = job.run_dir / name
        if path.is_file():
            before[path] = path.read_bytes()
            if done and _differ(name, before[path], text.encode()):
                earlier = path.with_suffix(f".{done:06d}.yaml")
                if not earlier.exists():  # else no step was kept that was made with this one
                    shutil.copyfile(path, earlier)
                    copies.append(earlier)
        write_whole(path, text)

    def undo() -> None:
        with contextlib.suppress(OSError):  # what refused the start is worth more
            for path, content in before.items():
                write_whole(path, content)
            for copy in copies:
                copy.unlink(missing_ok=True)

    return undo


def _save_tokenizer(job: Job, done: int) -> None:
    """Copies the files of the tokenizer, unless the run folder has them.

    The machine of a launcher may lack them, as it may lack the data. A process that reads data
    refuses a run without them.
    """
    path, own = Path(job.config.data.tokenizer), job.run_dir / tokenizer_files.FOLDER
    if job.config.data.tokenizer == BYTES or not path.exists():
        return
    if own.exists():
        before, now = tokenizer_paths.find(own), tokenizer_paths.find(path)
        if before.contents() == now.contents():
            return
        is_other = before.identity != now.identity
        was, is_now = (tokenizer_marks.end_of_model(files) or "none" for files in (before, now))
        if done and not is_other and was != is_now:
            problem = f"ends documents by other files of a model than before: {was}"
            fix = f"put {OF_MODEL} and {GENERATION} back as they are in {own}"
            raise DataError("data.tokenizer", problem, found=f"{is_now} in {path}", fix=fix)
        if is_other and done and not (earlier := own.with_name(f"{own.name}.{done:06d}")).exists():
            own.replace(earlier)
    tokenizer_paths.copy(path, own)


def _differ(name: str, before: bytes, now: bytes) -> bool:
    """Tells whether two contents of a file describe different runs, wherever the run folder is."""
    if name != CONFIG or before == now:
        return before != now
    try:
        contents = [yaml.safe_load(content) for content in (before, now)]
        for content in contents:
            # The run folder has its own copies of these files.
            del content["run"]["dir"], content["topology"]
            content["data"].pop("tokenizer", None)
    except (yaml.YAMLError, ValueError, RecursionError, KeyError, TypeError):
        return True
    return bool(contents[0] != contents[1])
