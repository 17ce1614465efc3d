"""An optimizer: optax's AdaBelief, which is elementwise."""

from holmesjax.config.update_rules import RULES, UpdateRule

NAME = "toy_belief"
EPSILON = {"eps": 1e-3, "eps_root": 1e-6}  # large: no rounding of a small number counts


def make(config, schedule, statements):
    import optax

    from holmesjax.optimizers.elementwise import Elementwise

    direction = optax.scale_by_belief(config.beta1, config.beta2, **EPSILON)
    return Elementwise(config, schedule, statements, direction)


RULE = UpdateRule(
    module=__name__,
    kept=lambda config: ("float32", "float32"),
    describe=lambda config: "beliefs in float32",
    reads=("beta1", "beta2"),
)


def add():
    RULES[NAME] = RULE
