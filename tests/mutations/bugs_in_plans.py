"""Planted bugs in topologies, costs, schedules and plans."""

from tests.mutations.bug import Bug

PLANS = (
    Bug(
        name="all-layers-again",
        module="holmesjax.planner.recomputation",
        old="return 0 if holds(0) else bisect.bisect_left(range(most), True, lo=1, key=holds)",
        new="return 0 if holds(0) else most",
        wrong="a stage that has to compute any layer again computes all of them again",
        tests=("tests/planner/test_recomputation.py",),
    ),
    Bug(
        name="results-of-shared-experts-kept",
        module="holmesjax.costs.memory",
        old="results = results - (np.asarray(stage.expert) > 1) * kind.exchange.kept.cut",
        new="results = results - 0 * kind.exchange.kept.cut",
        wrong="a layer counts as keeping what its experts compute again in the backward",
        tests=("tests/costs/test_memory.py::test_residuals_of_experts_are_those_that_jax_keeps",),
    ),
    Bug(
        name="gradients-of-shared-experts-put-off",
        module="holmesjax.costs.layer_times",
        old="weight_s -= device.products_s(put_off, stage.dtype)",
        new="weight_s -= 0.0 * device.products_s(put_off, stage.dtype)",
        wrong="a split backward counts as putting off the gradients of experts that devices share",
        tests=(
            "tests/costs/test_expert_exchange.py::"
            "test_what_devices_that_share_experts_compute_and_send_again",
        ),
    ),
    Bug(
        name="fastest-transport",
        module="holmesjax.topology.machines",
        old="processes * min(map(self.transport_bytes_per_s, ends))",
        new="processes * max(map(self.transport_bytes_per_s, ends))",
        wrong="the faster of two ends decides how fast boundaries go over TCP",
        tests=("tests/planner/test_planner.py::test_a_boundary_is_no_faster_than_its_slower_end",),
    ),
    Bug(
        name="zero-of-the-whole-width",
        module="holmesjax.costs.stage_shape",
        old="return model.width // stage.parameter_parts % stage.data == 0",
        new="return model.width % stage.data == 0",
        wrong="masters count as cut over data where fsdp leaves no whole parts",
        tests=("tests/costs/test_memory.py::test_data_cuts_masters_where_their_sharding_does",),
    ),
    Bug(
        name="room-of-activations-twice",
        module="holmesjax.costs.memory",
        old='freed, items["gradients"] = _left(freed, items["gradients"])',
        new='_, items["gradients"] = _left(freed, items["gradients"])',
        wrong="gradients and Muon's matrices both count as lying where activations were",
        tests=(
            "tests/costs/test_memory.py::test_gradients_of_a_whole_step_in_one_program_come_where_activations_were",
        ),
    ),
    Bug(
        name="copies-of-what-an-h200-reaches",
        module="benchmarks.kernels_gpu",
        old='"bytes_per_s": 3.0 * x.nbytes',
        new='"bytes_per_s": 2.0 * x.nbytes',
        wrong="a sum counts the bytes of a copy",
        tests=(
            "tests/benchmarks/test_kernels_gpu.py::test_the_rate_of_memory_counts_what_the_compiled_program_moves",
        ),
    ),
    Bug(
        name="checks-one-by-one",
        module="benchmarks.gpu_day_processes",
        old="if is_check else 1",
        new="if False else 1",
        wrong="checks of values wait for each other",
        tests=(
            "tests/benchmarks/test_gpu_day.py::test_checks_run_at_the_same_time_and_other_parts_alone",
        ),
    ),
    Bug(
        name="wide-gathers",
        module="holmesjax.costs.stage_times",
        old="DTYPE_BYTES[stage.dtype] * trained, data)",
        new='DTYPE_BYTES["float32"] * trained, data)',
        wrong="parameters are gathered in float32, whatever is computed in",
        tests=("tests/costs/test_stage_times.py::test_bfloat16_halves_what_is_gathered",),
    ),
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
            "tests/planner/test_planned_schedules.py::test_interleaved_stages_share_their_layers_over_chunks_in_model_order",
        ),
    ),
    Bug(
        name="weights-of-all-chunks-at-the-end",
        module="holmesjax.planner.candidates",
        old="last_weight=min(",
        new="last_weight=sum(",
        wrong="the gradients of weights of all chunks come after the last gradient of an input",
        tests=("tests/planner/test_bounds.py::test_chunks_with_split_backwards_have_a_bound",),
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
        old="key = blocks, is_split, recomputed\n",
        new="key = blocks, False, recomputed\n",
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
        module="holmesjax.planner.offers",
        old="np.floor(np.minimum((limit_s - fixed_s) / layer_s * (1 + 1e-9), room))",
        new="np.floor(np.minimum((limit_s - fixed_s) / layer_s * (1 + 1e-9), room)) - 1",
        wrong="stages count as holding a layer less than they can: good plans are left out unseen",
        tests=("tests/planner/test_search.py::test_no_plan_is_faster[a slow one]",),
    ),
    Bug(
        name="search-looks-once",
        module="holmesjax.planner.heuristic",
        old="        self._look_again()\n",
        new="",
        wrong="a plan is faster when the run pins what the planner chose for it",
        tests=(
            "tests/planner/test_pins.py::test_pins_never_make_a_plan_better_and_a_plan_can_be_pinned",
        ),
    ),
    Bug(
        name="plan-larger-than-pool",
        module="holmesjax.job",
        old="make_plans(config, topology, say, usable_memory, compares=compares)",
        new="make_plans(config, topology, say, compares=compares)",
        wrong="a plan fills memory that the user has not given to JAX",
        tests=("tests/plan/test_device_pool.py::test_a_plan_counts_with_a_smaller_pool",),
    ),
)
