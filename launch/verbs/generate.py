"""`launch generate`: continues texts with a run's newest checkpoint."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holmesjax import hub_names, job
from holmesjax.config import AUTO, OF_DIALOGUES, ModelConfig
from holmesjax.data import chat_template, tokenizer_files
from holmesjax.data.chat_template import ChatTemplate
from holmesjax.data.tokenizer_paths import GENERATION
from holmesjax.distributed.messages import Texts
from holmesjax.errors import ConfigError, DamagedError
from holmesjax.files import json_text, yaml_files
from holmesjax.generation.sampler import (
    Continuation,
    Sampler,
    encoded,
    refuse_own_model,
    tokenizer_of,
)
from holmesjax.generation.sampling import Sampling
from holmesjax.hugging_face import json_file
from holmesjax.plan.device_pool import DevicePool
from holmesjax.runtime import program_cache
from launch.generation_job import GenerationJob
from launch.launchers import table
from launch.launchers.table import LAUNCHERS

# Settings of a generation_config.json that would change a text; the options of the command count.
SHAPE_TEXTS = (
    *("bad_words_ids", "begin_suppress_tokens", "encoder_repetition_penalty", "epsilon_cutoff"),
    *("eta_cutoff", "force_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
    *("guidance_scale", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size"),
    *("num_beams", "penalty_alpha", "repetition_penalty", "sequence_bias", "stop_strings"),
    *("suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p"),
)
NEUTRAL_AT_1 = (
    *("temperature", "top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty"),
    *("guidance_scale", "num_beams"),
)
Complete = Callable[..., tuple[list[Continuation], Any]]  # as `Sampler.complete`


def run(args: argparse.Namespace) -> int:
    prompts = args.prompt or [""]
    _refuse_wrong(args)
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    folder = Path(args.run_dir)
    is_run = yaml_files.may_be_file(folder / job.CONFIG)
    is_chat = args.chat or args.messages is not None
    variables = _variables(args, is_chat=is_chat)
    said = [chat_template.of_user(prompt) for prompt in prompts]
    if args.messages is not None:
        said = [chat_template.read_messages(Path(args.messages))]
    make = _of_processes if args.launcher else _of_run if is_run else _of_weights
    complete, tokenizer = make(folder, args)
    _say_unused(tokenizer)
    known: Sequence[str | Sequence[int]] = prompts
    ends: Sequence[int] | None = None
    if is_chat:
        ChatTemplate.load(tokenizer)  # or says why not
        of_run = job.load_config(folder).data.chat_template_kwargs if is_run else None
        of_answers = tokenizer_files.load(tokenizer, {**(of_run or {}), **variables})
        assert of_answers.template is not None, "ChatTemplate.load has refused others"
        of_answers.template.refuse_unread(variables, "--chat-template-kwargs")
        known = [of_answers.answer_prompt(messages) for messages in said]
        ends = of_answers.ends
    streams = len(prompts) == 1 and not args.json
    if streams and not is_chat:
        sys.stdout.write(prompts[0])
    found, rate = complete(
        known,
        args.max_tokens,
        sampling,
        stop=args.stop,
        ends=ends,
        show=_write if streams else lambda row, piece: None,
    )
    if streams:
        sys.stdout.write("\n")
    else:
        _print(prompts, found, args)
    sys.stdout.flush()  # before the line of the other stream, which may go to the same file
    print(rate, file=sys.stderr)
    return 0


def _say_unused(folder: Path) -> None:
    """Names the settings that came with a model and that no option stands for by itself."""
    if not (folder / GENERATION).is_file():
        return
    said = json_file.read(folder / GENERATION)
    neutral = lambda name: (None, 0, [], {}, *((1,) if name in NEUTRAL_AT_1 else ()))
    given = [name for name in SHAPE_TEXTS if said.get(name) not in neutral(name)]
    if given:
        shown = ", ".join(f"{name} {json_file.shown(said[name])}" for name in given)
        _warn(f"not used    {GENERATION}: {shown}")


def _refuse_wrong(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that cannot be, or not together."""
    if args.max_tokens < 1:
        fix = "use 1 or more"
        raise ConfigError("--max-tokens", "must be 1 or more", found=args.max_tokens, fix=fix)
    if "" in args.stop:
        fix = "leave it out, or name a string"
        raise ConfigError("--stop", "must not be empty", found=repr(""), fix=fix)
    if args.messages is not None and args.prompt:
        fix = "write the prompt as the last message of the file"
        problem = "has the whole dialogue, so --prompt cannot be set beside it"
        raise ConfigError("--messages", problem, found=args.messages, fix=fix)
    where = {
        "--as-planned": args.as_planned,
        "--devices": args.devices is not None,
        "--launcher": args.launcher is not None,
    }
    if len(several := [option for option, is_set in where.items() if is_set]) > 1:
        problem = "cannot be set together: each decides where the model is"
        found, fix = " ".join(several), "leave all but one out"
        raise ConfigError(" and ".join(several), problem, found=found, fix=fix)
    reads = LAUNCHERS[args.launcher].reads if args.launcher else ()
    table.refuse_useless_options(table.given_of_agents(args), reads)


def _variables(args: argparse.Namespace, *, is_chat: bool) -> dict[str, Any]:
    """The variables of the chat template that the command names. Raises ConfigError."""
    where, said = "--chat-template-kwargs", args.chat_template_kwargs
    if said is None:
        return {}
    if not is_chat:
        fix = "add --chat, or leave it out"
        raise ConfigError(where, "is for a chat template", found=said, fix=fix)
    fix = """write an object of JSON, such as '{"enable_thinking": false}'"""
    try:
        found = json_text.value_of(said)
    except ValueError as error:
        raise ConfigError(where, "is no JSON", found=error, fix=fix) from None
    if not isinstance(found, dict) or {*found} & {*OF_DIALOGUES}:
        problem = f"must be names with values, none of them {', '.join(OF_DIALOGUES)}"
        raise ConfigError(where, problem, found=said, fix=fix)
    return found


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _of_run(folder: Path, args: argparse.Namespace) -> tuple[Complete, Path]:
    """Makes the sampler that continues texts with a run's weights, and finds its tokenizer."""
    _set_pool()
    program_cache.use(job.load_config(folder).run.compilation_cache, os.environ, _warn)
    sampler = Sampler.load(
        folder, _warn, as_planned=args.as_planned, devices=_count(args), ema=args.ema
    )
    return sampler.complete, folder / tokenizer_files.FOLDER


def _count(args: argparse.Namespace) -> int:
    """The devices of this process that have the model."""
    return 1 if args.devices is None else args.devices


def _of_processes(folder: Path, args: argparse.Namespace) -> tuple[Complete, Path]:
    """Makes a sampler that runs in the processes of the run's plan."""
    if not yaml_files.may_be_file(folder / job.CONFIG):
        fix = f"make a run of it: python -m launch import {folder} --to RUN_DIR; or use --devices"
        raise ConfigError("--launcher", "needs a run, which has a plan", found=folder, fix=fix)
    own = job.load_saved(folder)
    launcher = table.make(LAUNCHERS[args.launcher], own.topology, args)
    processes = GenerationJob(own, launcher, _warn)

    def complete(
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        stop: Sequence[str],
        ends: Sequence[int] | None,
        show: Callable[[int, str], None],
    ) -> tuple[list[Continuation], Any]:
        known: dict[Path, DamagedError] = {}
        while True:
            found = processes.checkpoint(known)
            refuse_own_model(ModelConfig(**found.settings["model"]))
            tokenizer = tokenizer_of(folder, found)
            texts = Texts(
                prompts=[encoded(tokenizer, prompt) for prompt in prompts],
                max_tokens=max_tokens,
                sampling=dataclasses.asdict(sampling),
                stop=list(stop),
                ends=None if ends is None else list(ends),
                ema=args.ema,
            )
            try:
                continued = processes.run(found, texts, show)
            except DamagedError as error:
                known[found.path] = error
                continue
            return [Continuation(**row) for row in continued.rows], continued.rate

    return complete, folder / tokenizer_files.FOLDER


def _of_weights(folder: Path, args: argparse.Namespace) -> tuple[Complete, Path]:
    """Makes the sampler of a folder in Hugging Face's format, which has its tokenizer."""
    if not yaml_files.may_be_file(folder / "config.json"):
        fix = "name the folder of a run, such as runs/quickstart"
        fix = hub_names.fix(str(folder), fix)
        problem = "is no run folder, and no folder of Hugging Face's format"
        found = f"no {job.CONFIG} and no config.json in it"
        raise ConfigError(str(folder), problem, found=found, fix=fix)
    if args.as_planned:
        fix = f"make a run of it: python -m launch import {folder} --to RUN_DIR; or use --devices"
        raise ConfigError("--as-planned", "needs a run, which has a plan", found=folder, fix=fix)
    if args.ema:
        raise ConfigError("--ema", "needs a run", found=folder, fix="leave it out")
    _set_pool()
    program_cache.use(AUTO, os.environ, _warn)
    return Sampler.of_hugging_face(folder, devices=_count(args)).complete, folder


def _set_pool() -> None:
    """Sets how much of a GPU JAX takes in this process, before it asks for a device."""
    os.environ.update(DevicePool.of_run(os.environ).variables)


def _write(_: int, piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _print(prompts: list[str], found: list[Continuation], args: argparse.Namespace) -> None:
    """Prints all texts, each whole: as a line of JSON, or behind its number."""
    for i, (prompt, row) in enumerate(zip(prompts, found, strict=True)):
        if args.json:
            print(json.dumps({"prompt": prompt, **dataclasses.asdict(row)}))
        else:
            print(f"[{i}] {prompt if args.messages is None and not args.chat else ''}{row.text}")
