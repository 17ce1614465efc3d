"""Groups of parameters equal optax's partitions, and those that nothing is in are refused."""

import jax
import numpy as np
import optax
import pytest

from holmesjax import job as jobs
from holmesjax.config import OptimizerConfig, ParameterGroupConfig
from holmesjax.errors import ConfigError
from holmesjax.optimizers.optimizer import make_optimizer
from tests.arrays import normal
from tests.jobs import write_run
from tests.stated_parameters import stated

GROUPS = (
    ParameterGroupConfig(pattern="*/frozen_D", learning_rate=0.0),
    ParameterGroupConfig(pattern="block_001/*", learning_rate=3e-2, weight_decay=0.5),
    ParameterGroupConfig(pattern="*/norm/scale_D", weight_decay=0.25),
    ParameterGroupConfig(pattern="*_D", learning_rate=0.7),  # what the others leave
)
# The rate and the decay of each parameter, by hand: matrices decay, and vectors do not.
WANTED = {
    "block_000": {"up_DF": (0.1, 0.2), "norm": {"scale_D": (0.1, 0.25)}, "bias_D": (0.7, 0.0)},
    "block_001": {"up_DF": (3e-2, 0.5), "norm": {"scale_D": (3e-2, 0.5)}, "frozen_D": (0.0, 0.0)},
}
TRANSFORMATIONS = {
    "adamw": lambda rate, decay: optax.adamw(rate, 0.9, 0.95, weight_decay=decay),
    "lion": lambda rate, decay: optax.lion(rate, 0.9, 0.95, weight_decay=decay),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updates_are_those_of_optax_partitions(name):
    leaf = lambda x: isinstance(x, tuple)
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: normal(1, *((4, 3) if path[-1].key.endswith("DF") else (4,))),
        WANTED,
        is_leaf=leaf,
    )
    config = OptimizerConfig(
        name=name, learning_rate=0.1, schedule="constant", weight_decay=0.2, groups=GROUPS
    )
    ours = make_optimizer(config, 10, stated(params))
    labels = jax.tree.map(str, WANTED, is_leaf=leaf)
    every = {str(rule): rule for rule in jax.tree.leaves(WANTED, is_leaf=leaf)}
    rules = {label: TRANSFORMATIONS[name](*rule) for label, rule in every.items()}
    theirs = optax.partition(rules, labels)
    got, state = params, ours.init(params)
    want, their_state = params, theirs.init(params)
    for step in range(3):
        gradients = jax.tree.map(lambda x, step=step: normal(step, *x.shape), params)
        got, state = ours.apply(gradients, state, got)
        updates, their_state = theirs.update(gradients, their_state, want)
        want = optax.apply_updates(want, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    frozen = [tree["block_001"]["frozen_D"] for tree in (got, params)]
    np.testing.assert_array_equal(*frozen)


@pytest.mark.parametrize(
    "groups, where, problem, fix",
    [
        ("{pattern: block_000/querry_DHK}", 0, "fits no parameter", "'block_000/query_DHK'"),
        ("{pattern: '*'}, {pattern: 'head/*'}", 1, "groups before it take all", "before them"),
    ],
)
def test_a_group_without_parameters_is_refused(groups, where, problem, fix, tmp_path):
    with pytest.raises(ConfigError, match=problem) as error:
        jobs.load(write_run(tmp_path, {"a": (1,)}), [f"optimizer.groups=[{groups}]"])
    assert error.value.where == f"optimizer.groups[{where}].pattern"
    assert fix in error.value.fix
