"""The planted bugs as data: which line, what becomes of it, and the quick tests that find it.

Each is a mistake that a person could make. They are spread over all packages, and no test was
written for the text of a bug. `python -m tests.mutations` plants them.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One wrong edit of one module."""

    name: str
    module: str  # dotted
    old: str  # occurs exactly once in the module
    new: str
    wrong: str  # what is wrong with it
    tests: tuple[str, ...]  # node ids; at least one of these tests fails

    def path(self, root: Path) -> Path:
        return root.joinpath(*self.module.split(".")).with_suffix(".py")

    def planted(self, text: str) -> str:
        """The text of the module with the bug."""
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must occur once"
        return text.replace(self.old, self.new)


BUGS = (
    # ---- settings ------------------------------------------------------------------------------
    Bug(
        name="bits-for-bytes",
        module="holmesjax.units",
        old='_scaled(DECIMAL, "bps", 1 / 8)',
        new='_scaled(DECIMAL, "bps")',
        wrong="Gbps are read as gigabytes per second",
        tests=("tests/test_units.py::test_parse",),
    ),
    Bug(
        name="odd-runs",
        module="holmesjax.config.parallel_checks",
        old="runs = 2 * context  # of tokens: each part has two",
        new="runs = context  # of tokens: each part has two",
        wrong="sequences that ring attention cannot cut in two runs for each device are accepted",
        tests=("tests/config/test_config.py::test_settings_that_do_not_fit_each_other",),
    ),
    # ---- topology ------------------------------------------------------------------------------
    Bug(
        name="fastest-transport",
        module="holmesjax.topology.machines",
        old="most = processes * min(map(self.transport_bytes_per_s, ends))",
        new="most = processes * max(map(self.transport_bytes_per_s, ends))",
        wrong="the faster of two ends decides how fast boundaries go over TCP",
        tests=("tests/planner/test_planner.py::test_a_boundary_is_no_faster_than_its_slower_end",),
    ),
    # ---- fp8 -----------------------------------------------------------------------------------
    Bug(
        name="scale-rounded-down",
        module="kernels.fp8",
        old="least = jnp.clip(exponent - (mantissa == 0.5), -100, 100)",
        new="least = jnp.clip(exponent - 1, -100, 100)",
        wrong="the largest numbers of an array are beyond the range of fp8 and are cut off",
        tests=("tests/kernels/test_fp8.py::test_scales",),
    ),
    Bug(
        name="magnitudes-of-one-microbatch-after-the-other",
        module="holmesjax.runtime.end_of_step",
        old='"max": jnp.max}',
        new='"max": jnp.sum}',
        wrong="largest magnitudes of microbatches and replicas are added up",
        tests=("tests/layers/test_fp8.py::test_every_plan_trains_as_one_device",),
    ),
    # ---- data ----------------------------------------------------------------------------------
    Bug(
        name="special-tokens-in-a-corpus",
        module="holmesjax.data.tokenizer_files",
        old="inner.encode_special_tokens = True",
        new="inner.encode_special_tokens = False",
        wrong="a special token that stands in a text becomes a mark",
        tests=("tests/data/test_tokenizer_files.py::test_a_text_comes_back_whole_and_in_pieces",),
    ),
    Bug(
        name="arrow-end",
        module="holmesjax.data.row_documents",
        old="if content.read() != END:",
        new="if not content.read():",
        wrong="rows of a dataset that was cut off behind a batch are missing without a word",
        tests=(
            "tests/data/test_document_formats.py::test_a_damaged_file_is_refused_with_its_place",
        ),
    ),
    Bug(
        name="page-of-ranks",
        module="holmesjax.data.number_files",
        old="np.searchsorted(self._first_P, value)) - 1",
        new='np.searchsorted(self._first_P, value, side="right")) - 1',
        wrong="documents that begin at one place are counted from their last page on",
        tests=("tests/data/test_number_files.py::test_ranks_are_those_of_the_array_on_every_page",),
    ),
    Bug(
        name="short-read",
        module="holmesjax.data.stores",
        old="if len(found) < count:",
        new="if len(found) < 0:",
        wrong="a file of tokens that shrinks gives short windows, and no message",
        tests=(
            "tests/data/test_token_files.py::test_a_file_that_becomes_shorter_while_it_is_read_is_named",
        ),
    ),
    Bug(
        name="half-the-validation",
        module="holmesjax.data.corpus",
        old="fraction * 2**64",
        new="fraction * 2**63",
        wrong="the validation split is half as large as it should be",
        tests=("tests/data/test_batches.py::test_the_share_of_the_files_held_out_is_the_fraction",),
    ),
    Bug(
        name="one-order-for-all-epochs",
        module="holmesjax.data.batches",
        old="round_keys(self.seed, stream + epoch)",
        new="round_keys(self.seed)",
        wrong="every epoch reads the windows in the same order",
        tests=(
            "tests/data/test_batches.py::test_every_epoch_visits_every_window_once_in_an_order_of_its_own",
        ),
    ),
    Bug(
        name="a-change-of-weights-begins-a-corpus-anew",
        module="holmesjax.data.mixing",
        old="own_K + self._taken[phase][source_K[here]]",
        new="own_K",
        wrong="where weights change, each corpus is read from its beginning again",
        tests=(
            "tests/data/test_mixing.py::test_a_change_of_weights_goes_on_where_each_source_was",
        ),
    ),
    Bug(
        name="prompts-are-targets",
        module="holmesjax.data.packing",
        old="targets[here][~trained] = -1",
        new="pass",
        wrong="what a user says counts in the loss",
        tests=(
            "tests/data/test_chat.py::test_answers_and_their_end_marks_are_the_targets_of_dialogues",
        ),
    ),
    Bug(
        name="a-piece-ends-without-its-target",
        module="holmesjax.data.packing",
        old="yield place + cut, min(length, count - cut)",
        new="yield place + cut, min(length, count - cut) - (cut + length < count)",
        wrong="the target behind each cut of a long document is lost",
        tests=(
            "tests/data/test_packing.py::test_each_target_of_each_document_comes_once_however_documents_are_cut",
        ),
    ),
    Bug(
        name="rows-of-a-mixture-stay",
        module="holmesjax.data.batches",
        old="part_B, order_B = source.schedule.picks(first_sequence + row_B)",
        new="part_B, order_B = source.schedule.picks(first_sequence + np.sort(row_B))",
        wrong="a corpus of a mixture is always read by the same devices",
        tests=("tests/data/test_mixing.py::test_sources_do_not_stay_in_rows_of_their_own",),
    ),
    Bug(
        name="masks-a-token-late",
        module="holmesjax.data.batches",
        old="np.cumsum(rows.begins_NL[:, :-1], axis=1)",
        new="np.cumsum(rows.begins_NL[:, 1:], axis=1)",
        wrong="the last token of a document is of the next one, as its target is",
        tests=(
            "tests/data/test_packing.py::test_documents_of_a_row_have_segments_of_their_own_and_padding_another",
        ),
    ),
    Bug(
        name="the-smallest-remainder",
        module="holmesjax.data.mixing",
        old='largest = np.argsort(-(share_S - whole_S), kind="stable")',
        new='largest = np.argsort(share_S - whole_S, kind="stable")',
        wrong="what is left of the weights of a mixture goes to those that were rounded least",
        tests=(
            "tests/data/test_mixing.py::test_weights_become_whole_numbers_by_largest_remainder",
        ),
    ),
    Bug(
        name="left-out-a-step-late",
        module="holmesjax.session",
        old="skipped_data.sequences(self.skipped, step - 1, step)",
        new="skipped_data.sequences(self.skipped, step, step + 1)",
        wrong="a run that goes back after a spike reads a batch of before again",
        tests=(
            "tests/checkpoints/test_skipped_data.py::test_each_return_goes_on_behind_the_spike",
        ),
    ),
    # ---- optimizers ----------------------------------------------------------------------------
    Bug(
        name="muon-without-lookahead",
        module="holmesjax.optimizers.muon",
        old="directions[path] = c.muon_beta * momenta[path] + (1.0 - c.muon_beta) * g",
        new="directions[path] = momenta[path]",
        wrong="Muon's momentum is not Nesterov's",
        tests=("tests/optimizers/test_muon.py::test_two_updates_worked_in_float64",),
    ),
    Bug(
        name="a-rate-for-a-factor",
        module="holmesjax.optimizers.groups",
        old="1.0 if own_rate is None else own_rate / config.learning_rate",
        new="1.0 if own_rate is None else own_rate",
        wrong="the learning rate of a group is multiplied with that of the section",
        tests=("tests/optimizers/test_groups.py::test_updates_are_those_of_optax_partitions",),
    ),
    Bug(
        name="an-average-of-the-beginning",
        module="holmesjax.runtime.end_of_step",
        old="keep = jnp.minimum(stage.ema_decay, (1.0 + n) / (10.0 + n))",
        new="keep = jnp.maximum(stage.ema_decay, (1.0 + n) / (10.0 + n))",
        wrong="the weights with which a run began weigh in its average for long",
        tests=("tests/runtime/test_average.py",),
    ),
    Bug(
        name="half-a-z-loss",
        module="kernels.cross_entropy",
        old="softmax = softmax * (1.0 + 2.0 * z_loss * log_sum)[..., None]",
        new="softmax = softmax * (1.0 + z_loss * log_sum)[..., None]",
        wrong="the gradient of the z-loss is half of what it is",
        tests=("tests/kernels/test_cross_entropy.py",),
    ),
    Bug(
        name="a-warm-up-ends-a-step-late",
        module="holmesjax.optimizers.learning_rates",
        old="peak * (after / warmup)",
        new="peak * (before / warmup)",
        wrong="the first update has a learning rate of 0, and the warm-up ends below its peak",
        tests=("tests/optimizers/test_adamw.py::test_cosine_with_warmup",),
    ),
    # ---- costs ---------------------------------------------------------------------------------
    Bug(
        name="zero-of-the-whole-width",
        module="holmesjax.costs.memory",
        old="is_whole = model.width // parts % stage.data == 0",
        new="is_whole = model.width % stage.data == 0",
        wrong="masters count as cut over data where fsdp leaves no whole parts",
        tests=("tests/costs/test_memory.py::test_data_cuts_masters_where_their_sharding_does",),
    ),
    Bug(
        name="wide-gathers",
        module="holmesjax.costs.stage_times",
        old="DTYPE_BYTES[stage.dtype] * trained, data)",
        new='DTYPE_BYTES["float32"] * trained, data)',
        wrong="parameters are gathered in float32, whatever is computed in",
        tests=("tests/costs/test_stage_times.py::test_bfloat16_halves_what_is_gathered",),
    ),
    # ---- plan ----------------------------------------------------------------------------------
    Bug(
        name="gradients-on-the-way-there",
        module="holmesjax.schedules.simulation",
        old="np.where(kind == 0, 2 * stage, 2 * to + 1)",
        new="np.where(kind == 0, 2 * stage, 2 * to)",
        wrong="gradients take the time of the way there, not of the way back",
        tests=(
            "tests/schedules/test_pipeline_schedules.py::test_simulation_agrees_with_a_ticking_clock",
            "tests/schedules/test_pipeline_schedules.py::test_both_directions_of_a_link_are_independent",
        ),
    ),
    Bug(
        name="chunks-stage-by-stage",
        module="holmesjax.plan.plan",
        old="for c in range(self.num_chunks) for s, stage in stages)",
        new="for s, stage in stages for c in range(self.num_chunks))",
        wrong="interleaved chunks are in the order of stages, not of the model",
        tests=(
            "tests/planner/test_planner.py::test_interleaved_stages_share_their_layers_over_chunks_in_model_order",
        ),
    ),
    # ---- planner -------------------------------------------------------------------------------
    Bug(
        name="weights-of-all-chunks-at-the-end",
        module="holmesjax.planner.candidates",
        old="last_weight=min(",
        new="last_weight=sum(",
        wrong="the gradients of weights of all chunks come after the last gradient of an input",
        tests=("tests/planner/test_search.py::test_chunks_with_split_backwards_have_a_bound",),
    ),
    Bug(
        name="targets-of-own-rows",
        module="holmesjax.data.batches",
        old="for source, i in picked)",
        new="for source, i in wanted)",
        wrong="a process weighs the loss by the targets of its own rows, not of the whole batch",
        tests=(
            "tests/data/test_batches.py::test_targets_that_do_not_count_are_below_zero_and_counted_over_the_whole_batch",
        ),
    ),
    Bug(
        name="unclipped-direction",
        module="holmesjax.optimizers.elementwise",
        old="g.astype(jnp.float32) * scale",
        new="g.astype(jnp.float32)",
        wrong="the gradients of an optax transformation are not clipped",
        tests=("tests/optimizers/test_elementwise.py",),
    ),
    Bug(
        name="rows-for-columns",
        module="holmesjax.optimizers.adafactor",
        old="pairs = zip(old, dims, strict=True)",
        new="pairs = zip(old, dims[::-1], strict=True)",
        wrong="the rows of a square matrix are means over its rows",
        tests=("tests/optimizers/test_adafactor.py",),
    ),
    Bug(
        name="means-cut-as-others",
        module="holmesjax.optimizers.adafactor",
        old="return Factored._make(map(without, dims))\n\n        shapes",
        new="return Factored._make(map(without, dims[::-1]))\n\n        shapes",
        wrong="the rows lie where the columns should",
        tests=("tests/optimizers/test_adafactor.py",),
    ),
    Bug(
        name="nobody-shares-a-nic",
        module="holmesjax.planner.mesh_order",
        old="self.link(way).bandwidth_bytes_per_s / num_rings for way in",
        new="self.link(way).bandwidth_bytes_per_s for way in",
        wrong="groups that leave a node together each have all of its NICs",
        tests=("tests/planner/test_mesh_order.py",),
    ),
    Bug(
        name="stale-seconds",
        module="holmesjax.planner.problem",
        old="key = slot, settings, role, blocks, is_split\n",
        new="key = slot, settings, role, blocks\n",
        wrong="a stage keeps the seconds of whole backwards where they are split, or the other way",
        tests=(
            "tests/planner/test_planner.py::test_a_backward_takes_as_long_in_one_piece_as_in_two_whichever_is_asked_for_first",
        ),
    ),
    Bug(
        name="nothing-goes-round",
        module="holmesjax.planner.problem",
        old="key = assignment.segments, chunks > 1\n",
        new="key = assignment.segments\n",
        wrong="stages with chunks keep the queues of those without, or the other way",
        tests=(
            "tests/planner/test_pipes.py::test_only_stages_with_chunks_have_boundaries_that_go_round_and_queue",
        ),
    ),
    Bug(
        name="bound-too-high",
        module="holmesjax.planner.shortlist",
        old="np.floor(np.minimum(in_time, self.room.load(depth)))",
        new="np.floor(np.minimum(in_time, self.room.load(depth))) - 1",
        wrong="stages count as holding a layer less than they can: good plans are left out unseen",
        tests=("tests/planner/test_search.py::test_no_plan_is_faster[a slow one]",),
    ),
    # ---- parallel ------------------------------------------------------------------------------
    Bug(
        name="minor-axis-first",
        module="holmesjax.transport.routes",
        old="part, num_parts = part * sizes[axis] + at[axis], num_parts * sizes[axis]",
        new="part, num_parts = part + at[axis] * num_parts, num_parts * sizes[axis]",
        wrong="of two axes that cut one dim the last is the major one",
        tests=("tests/transport/test_routes.py::test_a_spec_says_the_first_axis_is_major",),
    ),
    Bug(
        name="data-ignores-parts",
        module="holmesjax.parallel.sharding",
        old="cuts = data * parts if dim == PARTS_DIM else data",
        new="cuts = data",
        wrong="a dim that fsdp has cut is cut over data too, where the parts do not divide",
        tests=("holmesjax/parallel/sharding.py",),
    ),
    Bug(
        name="ring-without-its-last-step",
        module="holmesjax.parallel.collectives",
        old="for step in range(2, size + 1):",
        new="for step in range(2, size):",
        wrong="a reduction in a ring stops one device too early",
        tests=("tests/parallel/test_collectives.py::test_reduced_shards_are_those_of_the_sum",),
    ),
    # ---- models and optimizers -----------------------------------------------------------------
    Bug(
        name="large-residual-weights",
        module="holmesjax.layers.transformer",
        old="(2 * model.num_layers) ** -0.5",
        new="model.num_layers**-0.5",
        wrong="weights that add to the residual stream start as if a layer added once",
        tests=("tests/models/test_initial_values.py::test_a_model_starts_as_gpt_2_did",),
    ),
    Bug(
        name="window-of-one-more-key",
        module="holmesjax.layers.transformer",
        old="window=model.window)",
        new="window=model.window + 1)",
        wrong="a query of a block with a window sees one key too many",
        tests=("tests/layers/test_window.py::test_windows_equal_masked_dense_attention",),
    ),
    Bug(
        name="auxiliary-loss-without-weight",
        module="holmesjax.runtime.microbatch",
        old="loss = weight * auxiliary.losses[name]",
        new="loss = auxiliary.losses[name]",
        wrong="an auxiliary loss pulls on parameters as if its weight were 1",
        tests=(
            "tests/layers/test_toy_kind.py::test_auxiliary_losses_reach_all_gradients_and_all_stages",
        ),
    ),
    Bug(
        name="every-microbatch-draws-the-same",
        module="holmesjax.runtime.microbatch",
        old="first + jnp.arange(stage.microbatch_size)",
        new="jnp.arange(stage.microbatch_size)",
        wrong="a sequence draws by its place in a microbatch, and not by its number in the run",
        tests=(
            "tests/layers/test_toy_kind.py::test_auxiliary_losses_reach_all_gradients_and_all_stages",
        ),
    ),
    Bug(
        name="epsilon-of-another-family",
        module="holmesjax.models.transformer",
        old="how = model.norm_epsilon,",
        new="how = 1e-5,",
        wrong="all norms have the epsilon of GPT-2",
        tests=("tests/models/test_families.py::test_logits_are_those_of_transformers[qwen3]",),
    ),
    Bug(
        name="scaled-angles-of-windows",
        module="holmesjax.models.transformer",
        old="model.window_rotary_base)",
        new="model.window_rotary_base, model.rotary_scaling)",
        wrong="layers with a window turn by scaled frequencies",
        tests=(
            "tests/models/test_families.py::test_logits_are_those_of_transformers[gemma3_text]",
        ),
    ),
    Bug(
        name="slope-of-a-cap-forgotten",
        module="kernels.cross_entropy",
        old="dlogits if soft_cap is None else dlogits * (1.0 - jnp.square(wide / soft_cap))",
        new="dlogits",
        wrong="gradients of capped logits are those of logits without a cap",
        tests=("tests/kernels/test_cross_entropy.py::test_logits_are_capped_before_the_loss",),
    ),
    Bug(
        name="run-before-forgotten",
        module="kernels.attention.ring",
        old="return min(-(-(window - 1) // run), 2 * count - 1)",
        new="return min((window - 1) // run, 2 * count - 1)",
        wrong="a window does not reach into the last of the runs before on other devices",
        tests=("tests/kernels/attention/test_ring.py::test_sequences_cut_over_a_ring[window]",),
    ),
    Bug(
        name="turned-the-other-way",
        module="holmesjax.models.ops",
        old="[low * cos - high * sin, high * cos + low * sin]",
        new="[low * cos + high * sin, high * cos + low * sin]",
        wrong="rotary positions do not rotate: one sign is wrong",
        tests=("tests/models/test_ops.py::test_rotary_turns_pairs_and_keeps_distances",),
    ),
    Bug(
        name="rate-of-the-next-step",
        module="holmesjax.optimizers.adamw",
        old="rate = self.schedule(state.updates)",
        new="rate = self.schedule(count)",
        wrong="an update has the learning rate of the one after it",
        tests=("tests/optimizers/test_adamw.py::test_adamw_equals_its_formulas",),
    ),
    # ---- transport -----------------------------------------------------------------------------
    Bug(
        name="silent-link",
        module="holmesjax.transport.heartbeats",
        old="if time.monotonic() - self.heard_s >= self.limit_s:",
        new="if time.monotonic() - self.heard_s >= 10 * self.limit_s:",
        wrong="a link may be silent for ten times as long as it should",
        tests=("tests/transport/test_frames.py::test_silence_is_noticed_when_its_time_is_up",),
    ),
    Bug(
        name="goodbye-without-answer",
        module="holmesjax.transport.frames",
        old="                self._handler.left(self)\n                self.leave()\n",
        new="                self._handler.left(self)\n",
        wrong="a goodbye is not answered: the other end waits for its deadline",
        tests=(
            "tests/transport/test_frames.py::test_a_quiet_channel_beats_and_a_goodbye_is_no_failure",
        ),
    ),
    Bug(
        name="progress-does-not-count",
        module="holmesjax.transport.tcp",
        old="progress_s = max(start_s, *(channel.payload_s for channel in channels))",
        new="progress_s = start_s",
        wrong="a slow array is given up while its bytes arrive",
        tests=("tests/transport/test_tcp.py::test_a_slow_link_is_not_lost",),
    ),
    Bug(
        name="long-goodbyes",
        module="holmesjax.transport.tcp",
        old="        deadline_s = time.monotonic() + self._timeouts.silence_s\n",
        new="        deadline_s = time.monotonic() + 10 * self._timeouts.silence_s\n",
        wrong="a process that ends waits ten times as long for others as it should",
        tests=("tests/transport/test_tcp.py::test_closing_waits_as_long_as_a_link_may_be_silent",),
    ),
    # ---- hosts ---------------------------------------------------------------------------------
    Bug(
        name="gids-of-the-old-kind",
        module="holmesjax.hosts.nics",
        old='return gid.kind != "RoCE v2", of_address',
        new='return gid.kind == "RoCE v2", of_address',
        wrong="RoCE v1, which cannot be routed, is preferred",
        tests=("tests/hosts/test_nics.py::test_reasons",),
    ),
    Bug(
        name="one-good-nic-is-enough",
        module="holmesjax.hosts.doctor",
        old="elif len(there) - len(slow) < wanted.count:",
        new="elif len(slow) == len(there):",
        wrong="a node is well if one of its NICs has the rate that the topology says",
        tests=("tests/hosts/test_doctor.py::test_one_thing_wrong_is_one_finding",),
    ),
    Bug(
        name="round-trip-for-one-way",
        module="holmesjax.hosts.probe",
        old="latency_s=statistics.median(seconds[1][0]) / 2,",
        new="latency_s=statistics.median(seconds[1][0]),",
        wrong="the latency of a way is that of the way and back",
        tests=("tests/hosts/test_probe.py::test_a_line_of_known_speed_is_found_again",),
    ),
    Bug(
        name="any-prefix-of-a-nic",
        module="holmesjax.hosts.nccl",
        old='found.add("NCCL_IB_HCA", f"={ports}", reason)',
        new='found.add("NCCL_IB_HCA", ports, reason)',
        wrong="NCCL takes names as prefixes: mlx5_1 stands for mlx5_10 too",
        tests=("tests/hosts/test_nccl.py::test_variables_of_each_fabric",),
    ),
    # ---- runtime -------------------------------------------------------------------------------
    Bug(
        name="clipping-that-grows",
        module="holmesjax.runtime.end_of_step",
        old="jnp.minimum(1.0, stage.clip_norm / jnp.maximum(norm, 1e-12))",
        new="stage.clip_norm / jnp.maximum(norm, 1e-12)",
        wrong="gradients below the limit are scaled up to it",
        tests=("tests/runtime/test_whole_steps.py::test_every_row_equals_one_device",),
    ),
    Bug(
        name="every-chunk-sends-within",
        module="holmesjax.runtime.programs",
        old="return stage.num_replicas > 1 and stage.is_first",
        new="return stage.num_replicas > 1",
        wrong="a later stage gathers in its first forward, and the next one waits for that",
        tests=(
            "tests/runtime/test_pipeline.py::test_later_stages_send_over_data_while_there_is_nothing_else_to_do",
        ),
    ),
    Bug(
        name="tied-table-twice",
        module="holmesjax.checkpoints.writing",
        old='if f".{EMBED}." not in key}',
        new="}",
        wrong="the last stage saves the token table that it borrows from the first",
        tests=(
            "tests/checkpoints/test_checkpoint.py::test_every_array_of_the_model_is_saved_once_and_the_count_of_updates_by_each_stage",
        ),
    ),
    Bug(
        name="one-checkpoint-too-many",
        module="holmesjax.checkpoints.manifest",
        old="[keep:]",
        new="[keep + 1 :]",
        wrong="one checkpoint more than asked for stays on the disk",
        tests=("tests/checkpoints/test_checkpoint.py::test_keeps_the_newest",),
    ),
    Bug(
        name="copies-count-again",
        module="holmesjax.checkpoints.digests",
        old="for name in others), jnp.int32(0)) == 0",
        new="for name in others), jnp.int32(0)) >= 0",
        wrong="a shard that several devices hold counts several times",
        tests=(
            "tests/checkpoints/test_digests.py::test_digests_are_those_computed_by_hand_on_every_mesh",
        ),
    ),
    # ---- report --------------------------------------------------------------------------------
    Bug(
        name="resume-forgets-a-step",
        module="holmesjax.report.metrics",
        old='if record["step"] <= done_steps}',
        new='if record["step"] < done_steps}',
        wrong="the record of the last step before a checkpoint is cut off by a resume",
        tests=("tests/report/test_metrics.py::test_resume_cuts_off_the_steps_that_will_run_again",),
    ),
    Bug(
        name="the-fastest-process",
        module="holmesjax.report.recorder",
        old='step_time_s = max(part["step_time_s"] for part in parts)',
        new='step_time_s = min(part["step_time_s"] for part in parts)',
        wrong="a step takes as long as its fastest process says",
        tests=("tests/report/test_rates.py::test_a_step_ends_with_its_slowest_process",),
    ),
    # ---- distributed ---------------------------------------------------------------------------
    Bug(
        name="a-patient-member",
        module="holmesjax.distributed.member",
        old="self._patience_s = 2 * record.limit_s + self.timeout_s",
        new="self._patience_s = 20 * record.limit_s + 10 * self.timeout_s",
        wrong="a member of a job without progress waits ten times as long as it should",
        tests=(
            "tests/distributed/test_controller.py::test_the_patience_of_a_member_counts_from_the_last_progress",
        ),
    ),
    Bug(
        name="a-vote-for-all",
        module="holmesjax.distributed.controller",
        old="if len(votes) == self._num_stages:",
        new="if len(votes) == self._num_stages - 1:",
        wrong="the verdict of a step comes before all stages have voted",
        tests=("tests/distributed/test_controller.py::test_all_get_the_same_verdict",),
    ),
    Bug(
        name="one-port-for-all-coordinators",
        module="holmesjax.runtime.domain",
        old="port = config.port + stage if config.port else 0",
        new="port = config.port if config.port else 0",
        wrong="the coordinators of two stages on one host want the same port",
        tests=(
            "tests/distributed/test_controller.py::test_the_coordinators_of_a_node_do_not_share_a_port",
        ),
    ),
    Bug(
        name="times-of-another-clock",
        module="holmesjax.distributed.worker",
        old="start_s=interval.start_s + offset_s, end_s=interval.end_s + offset_s",
        new="start_s=interval.start_s - offset_s, end_s=interval.end_s - offset_s",
        wrong="tasks of another host are moved the wrong way on the common clock",
        tests=(
            "tests/distributed/test_controller.py::test_tasks_of_all_hosts_stand_on_the_clock_of_the_controller",
        ),
    ),
    # ---- lab -----------------------------------------------------------------------------------
    Bug(
        name="fault-a-step-late",
        module="launch.lab_machine.injector",
        old="if (fault.step or 0) <= step]",
        new="if (fault.step or 0) < step]",
        wrong="a fault is done one step after the step that it names",
        tests=("tests/lab/test_injector.py::test_a_fault_is_done_after_its_step_and_not_before",),
    ),
    # ---- launch --------------------------------------------------------------------------------
    Bug(
        name="blames-who-waits",
        module="launch.failure_causes",
        old="return 5\n        return 4 if record.fix is None else 0",
        new="return 0\n        return 4 if record.fix is None else 0",
        wrong="a process that tells of the loss of another is blamed for it",
        tests=(
            "tests/launch/test_supervisor.py::test_the_cause_is_found_in_whatever_order_failures_come",
        ),
    ),
    Bug(
        name="signals-as-statuses",
        module="launch.launchers.ssh",
        old="record=Exit(status=128 - record.status)",
        new="record=Exit(status=record.status - 128)",
        wrong="a process that was killed on a host counts as one that ended with a status",
        tests=("tests/launch/test_ssh.py::test_the_status_of_a_process_comes_through",),
    ),
    # ---- models of one's own -------------------------------------------------------------------
    Bug(
        name="weights-kept-as-activations",
        module="holmesjax.models.layer_tracing",
        old="        if own.weights is None:\n            found",
        new="        if True:\n            found",
        wrong="what a layer keeps counts its weights once for each microbatch",
        tests=("tests/models/test_layer_tracing.py::test_programs_say_what_the_closed_forms_say",),
    ),
    Bug(
        name="copies-of-weights-kept",
        module="holmesjax.models.own_kinds",
        old="without_weights(run)(params, *inputs)",
        new="run(params, *inputs)",
        wrong="a layer in bfloat16 keeps its weights as it has cast them, for each microbatch",
        tests=(
            "tests/models/test_flax_layers.py::test_products_in_bfloat16_keep_no_copy_of_a_weight",
        ),
    ),
    Bug(
        name="one-key-for-all-layers",
        module="holmesjax.models.own_kinds",
        old="out_shardings=shardings)(layer_key(seed, layer))",
        new="out_shardings=shardings)(jax.random.key(seed))",
        wrong="all layers of a model of one's own begin with the same numbers",
        tests=("tests/models/test_own_model.py::test_a_step_is_that_of_one_device",),
    ),
    Bug(
        name="dropout-in-a-validation",
        module="holmesjax.models.own_model",
        old="jax.vmap(keeps)(self.keys()) | ~self.trains",
        new="jax.vmap(keeps)(self.keys())",
        wrong="a validation of a model of one's own drops numbers, as a step does",
        tests=(
            "tests/models/test_drawing_and_tied.py::test_a_step_with_dropout_and_a_tied_table_is_that_of_one_device",
        ),
    ),
    # ---- Hugging Face's folders ----------------------------------------------------------------
    Bug(
        name="a-large-tensor-ends-a-file",
        module="holmesjax.hugging_face.export",
        old="if size > max_bytes:",
        new="if size > max_bytes and not filling:",
        wrong="a tensor above the limit of a file ends the file that is being filled",
        tests=(
            "tests/hugging_face/test_export.py::test_files_have_the_tensors_that_huggingface_hub_gives_them",
        ),
    ),
    # ---- kernels -------------------------------------------------------------------------------
    Bug(
        name="rounded-to-the-nearest",
        module="kernels.moments",
        old="is_up = draw * (end - start) < share * _size(float(most), which) - start",
        new="is_up = 0.5 * (end - start) < share * _size(float(most), which) - start",
        wrong="moments are rounded to the nearest, and small changes are lost",
        tests=(
            "tests/kernels/test_moments.py::test_numbers_are_rounded_up_and_down_in_proportion",
        ),
    ),
    Bug(
        name="one-token-more-in-a-window",
        module="kernels.attention.tiles",
        old="seen & (key > query - self.window)",
        new="seen & (key >= query - self.window)",
        wrong="a window sees one key more than it is wide",
        tests=("tests/kernels/attention/test_reference.py::test_long_sequences_go_in_chunks",),
    ),
)
