"""Times what a training step is made of on one device, and finds the calibration that explains it.

The matrix products are those of a model, forward and backward, on one device and shared by several,
because what a product reaches of the peak depends on its shape.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import least_squares

from holmesjax.config import ModelConfig, OptimizerConfig
from holmesjax.costs import optimizer_state
from holmesjax.costs.implementation import HOLMESJAX
from holmesjax.costs.layer_times import layers_s
from holmesjax.costs.optimizer_state import KEPT_BYTES
from holmesjax.costs.products import attention_products, head_product, layer_products
from holmesjax.costs.stage_shape import StageShape
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import Constant, Kind, Parameter
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import ops
from holmesjax.models.layer import apply, init_params
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime import call_times
from holmesjax.runtime.call_times import Call, normal
from holmesjax.runtime.chunk import Tree
from holmesjax.runtime.microbatch import Residuals
from holmesjax.topology.calibration import Calibration, Product, ProductSpeed
from holmesjax.topology.machines import DeviceKind

ROUNDS = 5  # of each operation; the median counts
ROUND_S = 0.05  # at least, of as many calls as that takes
LAYERS_ROUND_S = 0.5  # the same for layers, on whose time the most depends
MOST_SHARING = 8  # devices that share a product
SEQUENCES = (1, 4)  # in a microbatch
UNCACHED = 2**24  # parameters: far more than caches hold

# Guesses, and how far off they may be, as standard deviations of logarithms: a few shapes say
# little of each dim by itself. Large products reach about what the best of the timed ones reaches.
DIMS = (100.0, 80.0, 80.0)
SPREAD = (0.3, 1.5, 1.5, 1.5)  # of the share, and of each dim
NOISE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """The measurements of a kind of device."""

    products: dict[Product, float]  # seconds of each
    attention: list[Product]  # of scores and weighted values, forward
    attention_s: float  # forward and backward
    block_s: dict[int, float]  # of a Transformer layer and the sum of its gradients, by sequences
    update_bytes: float
    update_s: float
    dtype: str


def _block(model: ModelConfig) -> Kind:
    """The kind of the first Transformer layer, which is timed."""
    return kinds(model).blocks[0]


def _timed_layers(model: ModelConfig) -> list[str]:
    """The first layers of that kind, as many as no cache holds, or all of them."""
    names = [name for name, kind in layers(model).items() if kind == _block(model)]
    return names[: math.ceil(UNCACHED / _block(model).size())]


def shapes(model: ModelConfig) -> list[Product]:
    """The products that are timed: each shape of a layer and of the head, forward and backward."""
    divides = lambda n: (
        model.num_heads % n == model.kv_heads % n == model.feed_forward_width % n == 0
    )
    sharing = max(n for n in range(1, MOST_SHARING + 1) if divides(n))
    found: dict[Product, None] = {}
    for sequences in SEQUENCES:
        num_tokens = sequences * model.context_length
        for tensor in {1, sharing}:
            products = layer_products(_block(model), num_tokens, tensor)
            products.append(head_product(model, num_tokens, tensor))
            for product in products:
                found |= dict.fromkeys([product, *product.gradients])
    return list(found)


def measure(model: ModelConfig, dtype: str, progress: Callable[[str], None]) -> Timed:
    """Times everything on the first device of JAX."""
    products = {}
    for i, product in enumerate(todo := shapes(model)):
        progress(f"{i + 1} of {len(todo)} products")
        products[product] = _product_s(product, dtype)
    num_tokens = SEQUENCES[-1] * model.context_length
    progress("attention")
    attention_s = _attention_s(model, dtype)
    progress("layers")
    block_s = {sequences: _block_s(model, dtype, sequences) for sequences in SEQUENCES}
    progress("optimizer")
    return Timed(
        products=products,
        attention=attention_products(_block(model), model.context_length, num_tokens),
        attention_s=attention_s,
        block_s=block_s,
        update_bytes=float(
            optimizer_state.update_bytes(UNCACHED, 2 * KEPT_BYTES["float32"] * UNCACHED)
        ),
        update_s=_update_s(),
        dtype=dtype,
    )


def explain(
    timed: Timed, kind: DeviceKind, model: ModelConfig
) -> tuple[Calibration, dict[Product, float]]:
    """The calibration under which predictions come closest, and what each product is off by.

    Args:
      timed: what `measure` gave.
      kind: the device, whose own calibration does not count.
      model: whose layer was timed.

    Returns, for each product, its predicted seconds over the measured ones, minus 1.
    """
    peak = kind.peak_flop_per_s[timed.dtype]
    speed = _fit(timed.products, peak)
    products_s = sum(speed.seconds(product, peak) for product in timed.attention)
    usual_s = HOLMESJAX.attention_pairs * (1 + HOLMESJAX.attention_backward) * products_s
    update_bytes_per_s = timed.update_bytes / timed.update_s
    calibration = Calibration(
        products=speed,
        attention=_rounded(timed.attention_s / usual_s),
        memory=_rounded(update_bytes_per_s / kind.memory_bandwidth_bytes_per_s),
    )
    between, always_s = _rest(timed, dataclasses.replace(kind, calibration=calibration), model)
    calibration = dataclasses.replace(calibration, between=between, layer_s=always_s)
    off = {p: speed.seconds(p, peak) / seconds - 1 for p, seconds in timed.products.items()}
    return calibration, off


def _rest(timed: Timed, kind: DeviceKind, model: ModelConfig) -> tuple[float, float]:
    """The time of a layer without its products, its attention and its sums.

    `between` is the part that grows with the sequences, over its bytes, and at least 0.01.
    `layer_s` is the other part, and at least 0. The differences of measured times can be below
    these limits.
    """
    shape = lambda sequences: StageShape(
        blocks=tuple(int(block is _block(model)) for block in kinds(model).blocks),
        is_first=False,
        is_last=False,
        data=1,
        tensor=1,
        sequences=sequences,
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype=timed.dtype,
        checkpointing="none",
    )
    with_factor = lambda factor: dataclasses.replace(
        kind, calibration=dataclasses.replace(kind.calibration, between=factor)
    )
    added_s = float(kind.memory_s(HOLMESJAX.accumulate_bytes * _block(model).size()))
    rest_s, between_s = [], []
    for sequences, measured_s in timed.block_s.items():
        # Seconds are linear in the factor.
        one, two = (
            float(layers_s(model, shape(sequences), [with_factor(factor)])[0])
            for factor in (1.0, 2.0)
        )
        between_s.append(two - one)
        rest_s.append(measured_s - added_s - one + between_s[-1])
    few, many = timed.block_s
    grows_s = (rest_s[1] - rest_s[0]) / (many - few)
    between = _rounded(max(grows_s * few / between_s[0], 0.01))
    left_s = rest_s[0] - between * between_s[0]
    return between, _rounded(max(left_s, 0.0))


def _fit(products: dict[Product, float], peak_flop_per_s: float) -> ProductSpeed:
    measured = np.log(list(products.values()))
    best = max(product.flop / seconds for product, seconds in products.items())
    start = np.log([best / peak_flop_per_s, *DIMS])

    def speed(x: Any) -> ProductSpeed:
        share, rows, columns, depth = np.exp(x).tolist()
        return ProductSpeed(share=share, rows=rows, columns=columns, depth=depth)

    def residuals(x: Any) -> Any:
        tried = speed(x)
        predicted = np.log([tried.seconds(p, peak_flop_per_s) for p in products])
        errors = (predicted - measured) / NOISE
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, (x - start) / SPREAD])

    found = dataclasses.asdict(speed(least_squares(residuals, start).x))
    return ProductSpeed(**{name: _rounded(value) for name, value in found.items()})


def _rounded(number: float) -> float:
    """Three digits: more is noise."""
    return float(f"{number:.3g}")


def _seconds(run: Call, round_s: float = ROUND_S) -> float:
    """Seconds of one call, when many follow each other without a wait."""
    (seconds,) = call_times.rounds_s({"": run}, rounds=ROUNDS, round_s=round_s).values()
    return statistics.median(seconds)


def _product_s(product: Product, dtype: str) -> float:
    call = call_times.product(product.rows, product.columns, product.depth, dtype)
    return product.times * _seconds(call)


def _attention_s(model: ModelConfig, dtype: str) -> float:
    """Seconds of a forward and a backward of the layer's attention."""
    attention = _block(model).attention
    assert attention is not None, "a layer with attention is timed"
    tokens = SEQUENCES[-1], model.context_length
    q_BLHK = normal(0, *tokens, model.num_heads, model.head_width, dtype=dtype)
    k_BLGK = normal(1, *tokens, model.kv_heads, model.head_width, dtype=dtype)
    rule = ops.rule_of(attention)
    total = lambda q, k, v: ops.attention(q, k, v, rule=rule).astype(jnp.float32).sum()
    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return _seconds(lambda: gradients(q_BLHK, k_BLGK, k_BLGK))


def _block_s(model: ModelConfig, dtype: str, sequences: int) -> float:
    """Seconds of a forward and a backward of a Transformer layer, one of several, as in a stage.

    Two programs, the second of which adds to the gradients. A layer alone would find its parameters
    in the caches, where those of a stage have no room.
    """
    names = _timed_layers(model)
    params = {
        layer: jax.tree.map(lambda x: jnp.asarray(x, dtype), init_params(model, 0, [layer])[layer])
        for layer in names
    }
    x_BLD = normal(0, sequences, model.context_length, model.width, dtype=dtype)
    dy_BLD = normal(1, *x_BLD.shape, dtype=dtype)
    position_L = jnp.arange(model.context_length)

    def run_layers(params: Tree, x: jax.Array) -> jax.Array:
        for layer in names:
            x, _ = apply(layer, model, params[layer], x, position_L=position_L)
        return x

    @jax.jit
    def forward(params: Tree, x: jax.Array) -> tuple[jax.Array, Residuals]:
        y, pullback = jax.vjp(run_layers, params, x)
        return y, Residuals.of(pullback, params)

    @functools.partial(jax.jit, donate_argnums=2)
    def backward(params: Tree, saved: Residuals, gradients: Tree, dy: jax.Array) -> tuple:
        new, dx = saved.restore(params)(dy)
        return jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradients, new), dx

    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

    def run() -> Any:
        nonlocal gradients
        y, saved = forward(params, x_BLD)
        gradients, dx = backward(params, saved, gradients, dy_BLD)
        return gradients, y, dx

    return _seconds(run, LAYERS_ROUND_S) / len(names)


def _update_s() -> float:
    """Seconds of AdamW on one array of float32, in place."""
    shape = 2**12, UNCACHED // 2**12
    stated = Parameter(name="up_DF", shape=shape, initial=Constant(0.0), decays=True)
    stated_tree = {"block_000": {"up_DF": stated}}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), 100, stated_tree)
    params = {"block_000": {"up_DF": normal(0, *shape, dtype="float32")}}
    gradient = jax.tree.map(jnp.ones_like, params)
    update = lambda params, state, gradient: optimizer.apply(gradient, state, params)
    step = jax.jit(update, donate_argnums=(0, 1))
    held = params, optimizer.init(params)

    def run() -> Any:
        nonlocal held
        held = step(*held, gradient)
        return held

    return _seconds(run)
