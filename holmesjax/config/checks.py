"""Rules between settings: the table of all checks, by the sections that each reads.

A check yields a mistake for each rule that is broken; `where` is the dotted path of the setting to
blame. `files.load` runs it on files with other mistakes, too.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from holmesjax.config import (
    data_checks,
    island_checks,
    model_checks,
    parallel_checks,
    training_checks,
    unread_settings,
)
from holmesjax.config.data_sections import DataConfig
from holmesjax.config.mistakes import Check, wrong
from holmesjax.config.model_sections import ModelConfig
from holmesjax.config.sections import AUTO, CheckpointConfig, DistributedConfig, RunConfig
from holmesjax.errors import ConfigError
from holmesjax.files import places


def _cache_is_a_place(run: RunConfig) -> Iterator[ConfigError]:
    folder = run.compilation_cache
    if folder not in (None, AUTO) and not str(folder).startswith(("/", "~/")):
        problem = (
            "must be auto, null, or a whole path from / or ~/: processes start in other folders"
        )
        fix = "write the whole path, or null to keep nothing"
        yield wrong("run.compilation_cache", problem, folder, fix)


def _home_is_written_out(
    name: str, section: RunConfig | ModelConfig | DataConfig
) -> Iterator[ConfigError]:
    if (path := getattr(section, name.partition(".")[2]) or "").startswith("~"):
        problem = "must be a path without ~, which only a shell replaces at the start of a word"
        yield wrong(name, problem, path, f"write it out, as /home/NAME{path[1:]}")


def _run_folder_is_whole(run: RunConfig) -> Iterator[ConfigError]:
    if places.is_url(run.dir) and (mistake := places.mistake_in(run.dir)):
        problem = f"is a URL that names no run folder: {mistake}"
        yield wrong("run.dir", problem, run.dir, "write s3://BUCKET/NAME or gs://BUCKET/NAME")


def _steps_or_minutes(checkpoint: CheckpointConfig) -> Iterator[ConfigError]:
    if checkpoint.every is not None and checkpoint.every_minutes is not None:
        problem = f"cannot be set beside checkpoint.every = {checkpoint.every}"
        fix = "leave one of the two out, or set it to null"
        yield wrong("checkpoint.every_minutes", problem, checkpoint.every_minutes, fix)


def _ports_are_a_range(distributed: DistributedConfig) -> Iterator[ConfigError]:
    ports = distributed.ports
    if ports is not None and (len(ports) != 2 or ports[0] > ports[1]):
        problem = "must be two numbers, the first and the last port"
        yield wrong("distributed.ports", problem, list(ports), "write [7100, 7199], say")


def _relay_is_a_place(distributed: DistributedConfig) -> Iterator[ConfigError]:
    relay = distributed.relay
    if relay is None:
        return
    host = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:@\[\]-][^\s:@\[\]]*):([0-9]{1,5})", relay)
    if host is None or not 0 < int(host[2]) <= 65535:
        fix = "write relay.example.org:7443, or [fd00::1]:7443, say"
        yield wrong("distributed.relay", "must be a host and a port", relay, fix)
    if distributed.encrypt == "never":
        problem = "needs encryption, so that the relay cannot read what it passes on"
        yield wrong("distributed.relay", problem, relay, "leave distributed.encrypt = never out")


def _of_transformers(check: Callable[..., Iterator[ConfigError]]) -> Callable[..., Any]:
    """A check that is for our own layers alone."""

    def run(model: ModelConfig, *others: Any) -> Iterator[ConfigError]:
        return check(model, *others) if model.module is None else iter(())

    return run


CUT_BY_TENSOR = (
    *("num_heads", "num_kv_heads", "mlp_width", "vocab_size"),
    *("experts.width", "experts.shared_width"),
)
# By the sections that a check reads: the checks.
CHECKS: dict[tuple[str, ...], tuple[Check, ...]] = {
    ("run",): (
        _cache_is_a_place,
        _run_folder_is_whole,
        partial(_home_is_written_out, "run.dir"),
    ),
    ("train",): (
        training_checks.gradients_have_exponents,
        training_checks.gradients_cross_as_they_are,
        training_checks.profiled_steps_are_of_the_run,
        training_checks.rampup_grows,
        *unread_settings.checks_of("train"),
    ),
    ("model",): (
        _of_transformers(model_checks.heads_share_width),
        model_checks.heads_share_keys,
        _of_transformers(model_checks.rotary_turns_pairs),
        model_checks.rotary_settings_are_for_rotary_positions,
        model_checks.rotary_scaling_is_whole,
        _of_transformers(model_checks.windows_have_a_width),
        _of_transformers(model_checks.experts_are_whole),
        _of_transformers(model_checks.latents_are_whole),
        _of_transformers(model_checks.lora_targets_are_there),
        model_checks.frozen_or_adapted,
        model_checks.fp8_is_for_whole_training,
        model_checks.own_models_share_few_settings,
        partial(_home_is_written_out, "model.hf"),
    ),
    ("parallel",): (
        parallel_checks.one_value_per_stage,
        parallel_checks.stages_of_a_cluster_are_neighbours,
        parallel_checks.every_chunk_has_a_layer,
        parallel_checks.chunks_are_for_interleaving,
        parallel_checks.recomputed_layers_are_layers,
        parallel_checks.split_backwards_compute_nothing_again,
        island_checks.settings_are_for_islands,
        island_checks.clusters_are_of_one_island,
        island_checks.shares_suit_islands,
        island_checks.fragments_meet_in_turn,
        island_checks.the_outer_rule_suits_islands,
        island_checks.mailbox_has_its_settings,
        *unread_settings.checks_of("parallel"),
    ),
    ("kernels",): unread_settings.checks_of("kernels"),
    ("optimizer",): (
        *unread_settings.checks_of("optimizer"),
        training_checks.decay_keeps_signs,
        training_checks.function_is_for_optax,
        training_checks.schedule_has_one_unit,
        training_checks.decay_is_for_schedules_with_one,
    ),
    ("data",): (
        data_checks.variables_are_for_templates,
        data_checks.corpus_or_mixture,
        data_checks.names_are_of_one,
        data_checks.weights_are_of_the_mixture,
        data_checks.packed_documents_are_apart,
        data_checks.pattern_is_for_folders,
        *unread_settings.checks_of("data"),
        partial(_home_is_written_out, "data.corpus"),
        partial(_home_is_written_out, "data.tokenizer"),
    ),
    ("checkpoint",): (_steps_or_minutes,),
    ("distributed",): (_ports_are_a_range, _relay_is_a_place),
    ("model", "data"): (
        data_checks.vocabulary_holds_tokens,
        data_checks.own_models_read_no_documents,
    ),
    ("model", "parallel"): (
        parallel_checks.every_layer_is_placed,
        parallel_checks.no_more_layers_compute_again,
        parallel_checks.every_stage_has_a_layer,
        *(
            _of_transformers(partial(parallel_checks.tensor_cuts_evenly, name))
            for name in CUT_BY_TENSOR
        ),
        parallel_checks.sequences_with_capacity_are_whole,
        parallel_checks.experts_cut_evenly,
        _of_transformers(parallel_checks.width_cuts_evenly),
        parallel_checks.context_cuts_evenly,
        parallel_checks.own_sequences_are_whole,
    ),
    ("train", "parallel"): (
        parallel_checks.microbatches_are_equal,
        training_checks.rounded_gradients_cross,
        training_checks.experts_lie_still,
        island_checks.training_suits_islands,
    ),
    ("parallel", "plan"): (island_checks.islands_are_compared_by_time,),
    ("optimizer", "parallel"): (island_checks.islands_have_no_average,),
    ("train", "optimizer"): (training_checks.validated_average_is_kept,),
    ("train", "model", "optimizer"): (training_checks.schedule_fits_run,),
    ("train", "optimizer", "kernels"): (training_checks.kernel_has_adamw,),
    ("train", "kernels"): (
        training_checks.attention_is_deterministic_too,
        training_checks.cudnn_computes_as_trained,
    ),
    ("kernels", "model"): (
        training_checks.cudnn_has_gradients,
        training_checks.cudnn_caps_no_scores,
        training_checks.kernels_have_experts,
    ),
    ("train", "data"): (data_checks.validation_has_data,),
    ("data", "kernels"): (training_checks.cudnn_joins_documents,),
    ("data", "parallel"): (island_checks.mixtures_are_of_islands,),
}
