"""The gradients and a step of AdamW of an imported model are those of PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest

from holmesjax.config import OptimizerConfig
from holmesjax.hugging_face import folder
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.timeline import Clock
from tests.hand_made_plans import hand_made_plan, make_chunks, put
from tests.hugging_face import transformers_child
from tests.hugging_face.model_folders import write_folder
from tests.models.families import MODELS
from tests.one_device import MICROBATCH

pytestmark = pytest.mark.exhaustive
OPTIMIZER = OptimizerConfig(schedule="constant", clip_norm=None, **transformers_child.STEP)
NEAR = 1e-4  # of the norm of each array, in float32


def read_as(source, tree):
    """The numbers of a folder, by layer and name, in the tree of a state."""
    whole = lambda x: tuple((0, size) for size in x.shape)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: source.read(path[0].key, "/".join(k.key for k in path[1:]), whole(x)), tree
    )


def assert_all_near(found, wanted, near):
    """Each array within a share of its norm, or of a hundredth of the mean norm of all.

    The gradient of GPT-2's key bias is zero, so its change is the rounding of its numbers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    norm = np.mean([np.linalg.norm(x) for _, x in leaves])
    for (path, want), got in zip(leaves, jax.tree.leaves(found), strict=True):
        allowed = near * max(np.linalg.norm(want), 1e-2 * norm)
        assert np.linalg.norm(got - want) <= allowed, str(path)


@pytest.mark.parametrize("family", MODELS)
def test_a_step_on_two_stages_is_a_step_of_torch(family, tmp_path):
    if not transformers_child.is_installed():
        pytest.skip("needs the extra parity")
    plain = write_folder(tmp_path / "in", family, 4)
    model = dataclasses.replace(plain, hf=str(tmp_path / "in"))
    rows = np.random.default_rng(0).integers(256, size=(MICROBATCH, 33), dtype=np.int32)
    loss, gradients, weights = transformers_child.train(tmp_path / "in", rows)
    plan = hand_made_plan((2, 2), (2, 1), (1, 2))
    runner = make_runner(plan, make_chunks(model, plan, config=OPTIMIZER), evaluates=False)
    inputs = {"token_BL": rows[:, :-1], "target_BL": rows[:, 1:]}
    clock = Clock(2)
    states, found = runner.train_step(runner.init(0), put(runner, inputs), clock.timeline())
    clock.close()
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)
    begun = folder.open_weights(tmp_path / "in", plain)
    theirs = (folder.open_weights(where, plain) for where in (gradients, weights))
    of_gradients, of_weights = theirs
    difference = lambda a, b: jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, a, b)
    for state in states:
        # The first moment of a first step is a tenth of the gradient.
        ours = jax.tree.map(lambda x: np.asarray(x, np.float64) / 0.1, state.opt_state.mu)
        assert_all_near(ours, read_as(of_gradients, state.params), NEAR)
        old, new = (read_as(source, state.params) for source in (begun, of_weights))
        assert_all_near(difference(state.params, old), difference(new, old), 10 * NEAR)
