"""Experts that lie by their loads: no step changes, and no checkpoint."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.checkpoints import newest_whole, restoring
from holmesjax.config import ExpertsConfig, OptimizerConfig
from holmesjax.errors import ConfigError
from holmesjax.models.layer import statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime.expert_placement import ExpertPlacement, _take, with_places
from holmesjax.runtime.pipeline import make_runner
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.one_device import step_inputs
from tests.written_checkpoints import random_states, write_states

MODEL = make_model(
    num_layers=2,
    pattern=("block", "expert_block"),
    activation="swiglu",
    experts=ExpertsConfig(count=8, active=2, width=16, balance_loss=0.05, bias_rate=0.01),
)
PLAN = hand_made_plan((2,), 1, 2, expert=4, microbatches=2)
LAYER = "block_001"


def made(places_experts=True, **changes):
    own = {"places_experts": places_experts, **changes}
    return [dataclasses.replace(chunk, **own) for chunk in make_chunks(MODEL, PLAN)]


@pytest.mark.one_version
def test_steps_and_checkpoints_are_the_same_however_experts_lie(tmp_path):
    """Three steps; before the third, experts move by the loads of the second, as at a save."""
    losses, states = {}, {}
    for places in (False, True):
        chunks = made(places)
        runner = make_runner(PLAN, chunks, evaluates=False)
        placement = ExpertPlacement(chunks)
        states[places], _ = placement.by_load(runner.init(0))
        losses[places] = []
        for step in range(3):
            if step == 2:
                states[places] = placement.by_number(states[places])
                write_states(tmp_path / str(places), MODEL, chunks, (2,), states=states[places])
                states[places], peaks = placement.by_load(states[places])
            states[places], found = train_step(runner, states[places], step_inputs(8, 0))
            losses[places].append(float(found["loss"]))
    assert losses[True][:2] == losses[False][:2]  # nothing has moved yet
    assert losses[True][2] == pytest.approx(losses[False][2], rel=1e-6)
    [state] = states[True]
    place_E = np.asarray(state.fixed[LAYER]["router"]["place_E"])
    assert sorted(place_E) == list(range(8)) != place_E.tolist()
    assert peaks[LAYER].placed < peaks[LAYER].by_number
    one, other = (restoring.flatten(states[key][0]) for key in (False, True))
    moved = f"params.{LAYER}.down_EFD"
    np.testing.assert_allclose(other[moved][np.int32(place_E)], one[moved], rtol=1e-5, atol=1e-7)
    assert np.abs(np.asarray(other[moved]) - np.asarray(one[moved])).max() > 1e-3

    # What both have written before they moved is the same, and any plan reads it.
    read = [newest_whole.find(tmp_path / str(places), print) for places in (False, True)]
    named = [checkpoint.manifest["arrays"] for checkpoint in read]
    assert named[0] == named[1], "names, shapes or digests differ"
    chunks = made()
    again, _ = ExpertPlacement(chunks).by_load(restoring.restore(read[1], chunks))
    for path, x in jax.tree_util.tree_leaves_with_path(again[0].fixed):
        if "place" in str(path):
            np.testing.assert_array_equal(x, place_E)


def test_all_that_belongs_to_an_expert_moves_and_nothing_else():
    """Every array of a state by its first numbers, there and back."""
    chunks = made(ema_decay=0.9)
    state = with_places(chunks[0], random_states(chunks)[0])
    loads = np.float32([9, 7, 0, 0, 1, 1, 2, 2])
    router = {**state.fixed[LAYER]["router"], "count_E": jax.numpy.asarray(loads)}
    state = dataclasses.replace(state, fixed={**state.fixed, LAYER: {"router": router}})
    before = {key: np.asarray(x) for key, x in restoring.flatten(state).items()}
    placement = ExpertPlacement(chunks)
    placed, peaks = placement.by_load([state])
    assert peaks[LAYER].by_number == pytest.approx(16 / (22 / 4))
    assert peaks[LAYER].placed == pytest.approx(9 / (22 / 4))
    after = {key: np.asarray(x) for key, x in restoring.flatten(placed[0]).items()}
    place_E = after[f"fixed.{LAYER}.router.place_E"].astype(int)
    changed = {key for key, x in before.items() if not np.array_equal(x, after[key])}
    groups = ("params", "opt_state.mu", "opt_state.nu", "average.weights")
    names = ("gate_EDF", "up_EDF", "down_EFD")
    of_experts = {f"{group}.{LAYER}.{name}" for group in groups for name in names}
    assert changed - {f"fixed.{LAYER}.router.place_E"} == of_experts
    for key in of_experts:
        np.testing.assert_array_equal(after[key][place_E], before[key])
    back = restoring.flatten(placement.by_number(placed)[0])
    for key, x in before.items():
        np.testing.assert_array_equal(back[key], x, key)


@pytest.mark.parametrize("axes", ["expert", ("expert", "data")])
@pytest.mark.parametrize("width", [8192, 1021, 3])
def test_rows_move_in_a_ring_in_their_place_and_in_pieces(axes, width):
    """So a move fits where gradients of a step were, of which a layer has two such arrays."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    where = NamedSharding(mesh, P(axes, None))
    x_ED = np.random.default_rng(0).standard_normal((16, width)).astype(np.float32)
    order_E = np.random.default_rng(1).permutation(16).astype(np.int32)
    program = _take(where).lower(jax.device_put(x_ED, where), order_E).compile()
    np.testing.assert_array_equal(program(jax.device_put(x_ED, where), order_E), x_ED[order_E])
    text = program.as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text
    part = x_ED.nbytes // (4 if axes == "expert" else 8)
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes == memory.alias_size_in_bytes == part
    if width > 3:
        assert memory.temp_size_in_bytes < part, "pieces travel, and few numbers besides"
    if width == 8192:  # three eighths, and few numbers besides, as docs/experts.md says
        assert memory.temp_size_in_bytes == pytest.approx(0.4 * part, rel=0.1)


@pytest.mark.parametrize("sizes", [(128, 128, 16), (8, 512, 2048)])
def test_an_optimizer_without_a_row_for_each_expert_is_refused(sizes):
    """Adafactor keeps means over the two largest dims: over experts, or over both others."""
    count, width, inner = sizes
    config = OptimizerConfig(name="adafactor", learning_rate=1e-3)
    experts = ExpertsConfig(count=count, width=inner)
    model = make_model(num_layers=1, width=width, pattern=("expert_block",), experts=experts)
    chunks = make_chunks(model, hand_made_plan((model.num_layers,), 1, 1, expert=2))
    optimizer = make_optimizer(config, 100, statements(model))
    own = {"optimizer": optimizer, "places_experts": True, "model": model}
    chunks = [dataclasses.replace(chunk, **own) for chunk in chunks]
    if count == 8:
        assert ExpertPlacement(chunks).chunks == chunks
        return
    with pytest.raises(ConfigError, match="keeps no row for each expert"):
        ExpertPlacement(chunks)
