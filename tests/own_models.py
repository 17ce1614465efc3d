"""Models of your own for the tests: a language model of functions, and one of images by flax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

from holmesjax.models.flax_layers import linen, nnx as nnx_layer
from holmesjax.models.own_model import functions, next_token_losses


def init_embed(key):
    return {"token_VD": 0.1 * jax.random.normal(key, (256, 16))}


def embed(params, token_BL):
    return jnp.take(params["token_VD"], token_BL, axis=0)


def init_block(key):
    up, down = jax.random.split(key)
    return {
        "norm": {"scale": jnp.ones(16)},
        "up_DF": 0.1 * jax.random.normal(up, (16, 64)),
        "down_FD": 0.1 * jax.random.normal(down, (64, 16)),
    }


def block(params, x_BLD):
    """A causal mean over the tokens so far, and a feed-forward."""
    count_L = jnp.arange(1, x_BLD.shape[1] + 1, dtype=x_BLD.dtype)
    mean_BLD = jnp.cumsum(x_BLD, axis=1) / count_L[None, :, None]
    h_BLD = (x_BLD + mean_BLD) * params["norm"]["scale"][None, None]
    return x_BLD + jax.nn.gelu(h_BLD @ params["up_DF"]) @ params["down_FD"]


def init_head(key):
    return {"out": 0.1 * jax.random.normal(key, (16, 256))}


def head(params, x_BLD):
    return x_BLD @ params["out"]


def language_model(settings):
    first, middle = functions(init_embed, embed), functions(init_block, block)
    last = functions(init_head, head, loss=next_token_losses, axes={"out": ("fsdp", "tensor")})
    return [first, *settings.num_layers * [middle], last]


# ---- modules of flax: a small encoder of images --------------------------------------------------

WIDTH, PATCHES, PIXELS, CLASSES = 16, 4, 9, 3


class Patches(nn.Module):
    """Patches of an image, [sequences, PATCHES, PIXELS], as vectors."""

    @nn.compact
    def __call__(self, patch_BLP):
        place_LD = self.param("place", nn.initializers.normal(0.1), (PATCHES, WIDTH))
        return nn.Dense(WIDTH)(patch_BLP) + place_LD[None]


def _cut(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Encoder(nn.Module):
    """Attention over all patches, and a feed-forward whose hidden dim `tensor` cuts."""

    @nn.compact
    def __call__(self, x_BLD):
        x_BLD = x_BLD + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x_BLD))
        h_BLF = nn.Dense(2 * WIDTH, kernel_init=_cut("embed", "mlp"))(nn.LayerNorm()(x_BLD))
        return x_BLD + nn.Dense(WIDTH, kernel_init=_cut("mlp", "embed"))(nn.gelu(h_BLF))


class Mixer(nnx.Module):
    """A layer of an MLP-Mixer: products over the patches, and then over their numbers."""

    def __init__(self, rngs):
        cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.patches = nnx.Linear(PATCHES, PATCHES, rngs=rngs)
        self.numbers = nnx.Linear(WIDTH, WIDTH, kernel_init=cut, rngs=rngs)

    def __call__(self, x_BLD):
        h_BDL = self.patches(self.norms[0](x_BLD).swapaxes(1, 2))
        x_BLD = x_BLD + nnx.gelu(h_BDL).swapaxes(1, 2)
        return x_BLD + nnx.gelu(self.numbers(self.norms[1](x_BLD)))


class Classes(nn.Module):
    """The class of an image, of the mean of its vectors."""

    @nn.compact
    def __call__(self, x_BLD):
        return nn.Dense(CLASSES)(x_BLD.mean(1))


def label_losses(logits_BC, label_B):
    return optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_B)


def image_model(settings):
    first = linen(Patches(), reads={"patches": ((PATCHES, PIXELS), "float32")})
    last = linen(Classes(), loss=label_losses, reads={"label": ((), "int32")})
    turns = [linen(Encoder()), nnx_layer(Mixer)]
    return [first, *(turns[i % 2] for i in range(settings.num_layers)), last]


def images():
    """Patches with a brighter one, whose place is the label: the same in every process."""
    random = np.random.default_rng(7)
    found = {}
    for split, count in (("train", 64), ("validation", 16)):
        label_N = random.integers(CLASSES, size=count)
        patch_NLP = random.normal(size=(count, PATCHES, PIXELS)).astype(np.float32)
        patch_NLP[np.arange(count), label_N] += 1.0
        found[split] = {"patches": patch_NLP, "label": label_N}
    return found


def signs(config):
    """An optimizer of optax: the signs of a momentum."""
    return optax.chain(optax.trace(config.beta1), optax.scale_by_sign())


def with_schedule(config):
    """The same beside a schedule that halves the rate in each update."""
    return signs(config), lambda update: 0.5**update


def schedule_inside(config):
    """The schedule is a part of the transformation."""
    return optax.chain(optax.scale_by_sign(), optax.scale_by_schedule(lambda n: 0.5**n))


def schedule_injected(config):
    """Another way in which optax has a schedule inside."""
    scaled = optax.inject_hyperparams(optax.scale_by_learning_rate)
    return optax.chain(optax.scale_by_sign(), scaled(learning_rate=lambda n: 0.5**n))


def two_rates(config):
    """The schedule gives two numbers."""
    return signs(config), lambda update: jnp.ones(2)


def rows(config):
    """An optimizer that keeps a number for each row."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[:1]), params),
        lambda gradients, state, params=None: (gradients, state),
    )


def sophia(config):
    """An optimizer that needs more than gradients: the loss, for its Hessian."""
    return optax.contrib.sophia(config.learning_rate)
