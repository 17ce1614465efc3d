"""A packed row gives each of its documents the losses and gradients that it has alone.

The oracle is another batch, with a row for each document, and no step on one device: the rows of
`tests/whole_steps.py` would have the same mistake in positions and masks on both sides.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from holmesjax.data import packing
from holmesjax.data.batches import Batches, model_inputs
from holmesjax.data.packing import DocumentRange, Spans
from holmesjax.models import ops
from holmesjax.runtime.pipeline import make_runner
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, put, train_step
from tests.one_device import RTOL, SEED, assert_trees_near
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("packed_rows")

LENGTH = 16
SIZES = (9, 8, 13, 4, 3, 17, 6, 2)  # tokens of each document, of which the first is no target
PLANS = {
    "one": hand_made_plan((2,), 1, 1, microbatches=2),
    "cut": hand_made_plan((1, 1), 1, 1, context=2, microbatches=2),
}


def make_batches():
    """A batch with packed rows, and one with each document in a row of its own: eight rows each."""
    token_T = np.random.default_rng(SEED).integers(256, size=sum(SIZES))
    start_D = np.cumsum([0, *SIZES[:-1]])
    last = len(token_T)
    own = DocumentRange(token_T=token_T, start_D=start_D, first=0, last=last, marks_end=False)
    rows = packing.packed(Spans([own]), LENGTH, "", None)
    found = model_inputs(
        Batches._rows(Batches.__new__(Batches), [(rows, i) for i in range(len(rows))], None)
    )
    assert len(rows) < len(SIZES)  # some documents share a row
    fills = {"token_BL": 0, "target_BL": -1, "segment_BL": 0}
    packed = {name: np.full((len(SIZES), LENGTH), fill, np.int32) for name, fill in fills.items()}
    alone = {name: x.copy() for name, x in packed.items()}
    for name, x in found.items():
        packed[name][: len(rows)] = x
    for row, (first, size) in enumerate(zip(start_D, SIZES, strict=True)):
        tokens = token_T[first : first + size]
        alone["token_BL"][row, : size - 1] = tokens[:-1]
        alone["target_BL"][row, : size - 1] = tokens[1:]
        alone["segment_BL"][row, size - 1 :] = 1
    return packed, alone


PACKED, ALONE = make_batches()


@functools.cache
def runner_of(positions, name="one", **changes):
    plan = PLANS[name]
    chunks = make_chunks(make_model(num_layers=2, positions=positions), plan, mask=True)
    restarts = positions == "learned"
    chunks = [dataclasses.replace(s, **{"restarts_positions": restarts, **changes}) for s in chunks]
    return make_runner(plan, chunks)


def losses_of(runner, inputs, pieces):
    """The sum of the losses of each piece, a row and the places in it."""
    states, found = runner.init(SEED), []
    for row, places in pieces:
        target_BL = np.full_like(inputs["target_BL"], -1)
        target_BL[row, places] = inputs["target_BL"][row, places]
        own = put(runner, {**inputs, "target_BL": target_BL}, trains=False)
        found.append(float(runner.evaluate(states, own)))
    return found


def where_documents_are():
    """Each document's row and places, alone and packed."""
    alone, packed = [], []
    for row, size in enumerate(SIZES):
        alone.append((row, slice(0, size - 1)))
        own = ALONE["token_BL"][row, : size - 1].tolist()
        [found] = [
            (other, slice(first, first + size - 1))
            for other in range(len(SIZES))
            for first in range(LENGTH - size + 2)
            if PACKED["token_BL"][other, first : first + size - 1].tolist() == own
            and (PACKED["target_BL"][other, first : first + size - 1] >= 0).all()
        ]
        packed.append(found)
    return alone, packed


@pytest.mark.parametrize("positions", rows({name: name for name in ("rotary", "learned")}))
def test_each_document_of_a_row_has_the_losses_that_it_has_alone(positions):
    runner = runner_of(positions)
    alone, packed = where_documents_are()
    assert any(places.start for _, places in packed)  # some begin inside of their row
    want = losses_of(runner, ALONE, alone)
    np.testing.assert_allclose(losses_of(runner, PACKED, packed), want, rtol=1e-5)
    wrong = {"mask_documents": False} if positions == "rotary" else {"restarts_positions": False}
    other = losses_of(runner_of(positions, **wrong), PACKED, packed)
    differs = [abs(a - b) > 1e-3 * b for a, b in zip(other, want, strict=True)]
    # Only those behind another document, or of padding, see what is not theirs.
    assert differs == [places.start > 0 for _, places in packed]


@pytest.mark.parametrize(
    "positions, name",
    rows(
        {
            "learned on devices that share sequences": ("learned", "cut"),
            "learned": ("learned", "one"),
            "rotary": ("rotary", "one"),
        }
    ),
)
def test_a_step_of_packed_rows_is_that_of_the_documents_alone(positions, name):
    found = []
    for inputs, of in ((PACKED, name), (ALONE, "one")):
        runner = runner_of(positions, of)
        states, metrics = train_step(runner, runner.init(SEED), inputs)
        # With beta1 = 0 the first moment is the gradient.
        gradients = {name: x for state in states for name, x in state.opt_state.mu.items()}
        found.append((float(metrics["loss"]), gradients))
    (loss, gradients), (want, wanted) = found
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert_trees_near(gradients, jax.tree.map(np.asarray, wanted), RTOL, "the gradient")


def test_positions_begin_anew_in_each_document():
    segment_BL = np.array([[0, 0, 1, 1, 1, 2], [1, 2, 3, 3, 4, 4]])
    wanted = [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 0, 1]]
    assert ops.positions_in_documents(segment_BL).tolist() == wanted
