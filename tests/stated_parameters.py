"""Parameters with what their layer states of them."""

import jax

from holmesjax.layer_specs.kind import Constant, Parameter


def stated(tree):
    """Statements of an array for each of a tree's: matrices decay."""
    zero = Constant(0.0)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: Parameter(
            name=path[-1].key, shape=x.shape, initial=zero, decays=len(x.shape) > 1
        ),
        tree,
    )
