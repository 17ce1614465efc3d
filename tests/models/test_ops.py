"""How array functions are chosen, and those that have no kernel."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh

from holmesjax.config import KernelsConfig
from holmesjax.config.rotary import frequencies
from holmesjax.errors import ConfigError
from holmesjax.models import ops
from holmesjax.models.activation_checkpointing import checkpointed
from kernels.attention.tiles import Rule
from tests.arrays import assert_near, normal, wide
from tests.causal_attention import causal
from tests.kernels.attention.gpus import A100, H200, first_devices, lowered_for_cuda
from tests.kernels.attention.oracle import inputs


def test_attention_is_computed_as_the_config_asks(monkeypatch):
    """Plain JAX here, and on GPUs each of the others, with the arrays' own segments."""
    q, k, v = inputs(20, 20, 4, 2, 64, dtype="bfloat16")
    assert_near(ops.attention(q, k, v), causal(q, k, v), "bfloat16")
    ids = jnp.zeros((2, 20), jnp.int32)
    counts = []
    for device, asked, unproven in (
        (H200, "reference", None),
        (H200, "pallas", "all"),
        (H200, "auto", "all"),
        (H200, "auto", None),
        (A100, "triton", "all"),
        (A100, "auto", "all"),
        (A100, "auto", None),
    ):
        monkeypatch.setattr(ops.Kernels, "device", device)
        config = KernelsConfig(attention=asked, deterministic_attention=True)
        kernels = ops.Kernels(config, unproven=unproven)
        run = lambda q, k, v, kernels=kernels: ops.attention(q, k, v, ids, kernels)
        gradients = lambda q, k, v, run=run: jax.vjp(run, q, k, v)[1](q)
        text = str(jax.make_jaxpr(gradients)(q, k, v))
        counts.append([text.count(name) for name in ("kernel_name", "name=mha_")])
    assert counts == [[0, 0], [3, 0], [0, 0], [3, 0], [0, 2], [0, 0], [0, 2]]
    monkeypatch.setattr(ops, "missing", lambda implementation: None)
    calls = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, **options: calls.append(options) or args[0]
    )
    given = ops.attention(q, k, v, kernels=ops.Kernels(KernelsConfig(attention="cudnn")))
    np.testing.assert_array_equal(given, q)
    asked = {"is_causal": True, "scale": None, "local_window_size": None, "return_residual": False}
    assert calls == [{**asked, "implementation": "cudnn"}]


@pytest.mark.parametrize("window, length", [(None, 20), (8, 20), (None, 19)])
def test_a_window_and_an_odd_length_go_to_cudnn_forward_and_backward(monkeypatch, window, length):
    """cuDNN counts the query's own key too. Its library is not there, and JAX lowers the calls."""
    monkeypatch.setattr(ops, "missing", lambda implementation: None)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(ops.Kernels, "device", H200)
    q, k, v = inputs(length, length, 4, 2, 64, dtype="bfloat16")
    rule = Rule(window=window, scale=0.25)
    run = lambda q, k, v: ops.attention(q, k, v, rule=rule)  # `auto` takes it
    text = lowered_for_cuda(lambda q, k, v: jax.vjp(run, q, k, v)[1](q), q, k, v)
    for call in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        [line] = (line for line in text.splitlines() if call in line)
        said = line.replace("\\22", '"')
        assert f'"sliding_window_length": {window or 0},' in said
        assert '"mask_type": "CAUSAL"' in said
        assert '"fmha_scale": 0.25,' in said


@pytest.mark.parametrize("policy, forwards", [("none", 1), ("dots", 1), ("full", 2)])
def test_a_checkpoint_of_products_keeps_what_cudnn_gives(monkeypatch, policy, forwards):
    monkeypatch.setattr(ops, "missing", lambda implementation: None)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(ops.Kernels, "device", H200)
    arrays = inputs(20, 20, 4, 2, 64, dtype="bfloat16")
    layer = checkpointed(lambda q, k, v: ops.attention(jnp.sin(q), k, v), policy)
    gradients = lambda q, k, v: jax.vjp(layer, q, k, v)[1](q)
    text = str(jax.make_jaxpr(gradients)(*arrays))
    assert text.count(f"{ops.CUDNN_PRIMITIVE}[") == forwards


def test_what_cannot_be_is_refused():
    narrow = inputs(20, 20, 4, 2, 8)
    for asked, supported in (("pallas", "NVIDIA Hopper GPUs"), ("cudnn", "NVIDIA GPUs")):
        kernels = ops.Kernels(KernelsConfig(attention=asked))
        with pytest.raises(
            ConfigError, match=rf"{asked} cannot do it.*\n.*cpu devices: supported are {supported}"
        ):
            ops.attention(*narrow, kernels=kernels)


def test_cached_attention_is_the_last_rows_of_attention():
    q, k, v = inputs(12, 12, 4, 2, 16)
    padded = [jnp.pad(x, [(0, 0), (0, 5), (0, 0), (0, 0)], constant_values=3.0) for x in (k, v)]
    for rule in (Rule(), Rule(window=4, soft_cap=1.5, scale=0.7)):
        places = jnp.where(jnp.arange(17) < 12, jnp.arange(17), -1)[None], jnp.arange(9, 12)[None]
        got = ops.cached_attention(q[:, 9:], *padded, *places, rule)
        assert_near(got, causal(q, k, v, rule)[:, 9:])


def test_projections_to_and_from_heads():
    x, weights = normal(0, 2, 5, 12), (normal(1, 12, 4, 3), normal(2, 12, 2, 3))
    for got, w in zip(ops.linears(x, weights), weights, strict=True):
        assert_near(got, np.einsum("bld,dhk->blhk", *wide((x, w))))
    heads, out = normal(3, 2, 5, 4, 3), normal(4, 4, 3, 12)
    assert_near(ops.linears(heads, (out,), 2)[0], np.einsum("blhk,hkd->bld", *wide((heads, out))))


def test_rotary_turns_pairs_and_keeps_distances():
    """The last two numbers of a head do not turn."""
    x, (frequency, _) = normal(0, 1, 6, 2, 10), frequencies(8, 100.0)
    got = np.asarray(ops.rotate(x, jnp.arange(6), frequency, 1.5), np.float64)
    for i in range(6):
        turn = 1.5 * np.exp(1j * i * 100.0 ** (-np.arange(4) / 4))
        pairs = (wide(x)[0, i, :, :4] + 1j * wide(x)[0, i, :, 4:8]) * turn
        assert_near(got[0, i], np.concatenate([pairs.real, pairs.imag, x[0, i, :, 8:]], axis=-1))
    shifted = ops.rotate(x, 50 + jnp.arange(6), frequency, 1.5)
    products = lambda y: np.einsum("blhk,bmhk->hlm", y, y)
    assert_near(products(shifted), products(got))


def test_many_logits_are_cut_into_chunks():
    """By default where a device's float32 logits take more than half a GiB, and that saves some."""

    def chunks(asked, B, L, D, mesh=None, vocab_size=128_256, **more):
        x_BLD = jax.ShapeDtypeStruct((B, L, D), jnp.bfloat16)
        config = KernelsConfig(cross_entropy=asked)
        return ops.Kernels(config, mesh, **more).logit_chunks(x_BLD, vocab_size)

    assert chunks("auto", 4, 4096, 4096) == 16
    assert chunks("auto", 1, 1024, 64) == chunks("reference", 4, 4096, 4096) == 1
    assert chunks("auto", 1, 4096, 4096) == 1  # the sum of the weight's gradient is larger
    assert chunks("chunked", 2, 16, 8, vocab_size=256) == 2
    assert chunks("chunked", 2, 1, 8, vocab_size=256) == 1
    mesh = Mesh(first_devices(8).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    assert chunks("auto", 4, 4096, 2048, mesh) == 4
    assert chunks("auto", 4, 4096, 2048, mesh, logit_bytes=2**30) == 2


def test_the_oldest_device_of_a_stage_chooses_its_kernels():
    """Kernels for Hopper GPUs alone are no choice where there are later ones."""

    def of(*capabilities):
        shared = {"platform": "gpu", "device_kind": "NVIDIA GPU"}
        devices = [SimpleNamespace(**shared, compute_capability=x) for x in capabilities]
        mesh = SimpleNamespace(devices=np.array([devices], object))
        return ops.Kernels(mesh=mesh).device.compute_capability

    assert of("gfx942", "gfx942") == "gfx942"  # an AMD GPU
    assert of("9.0", "9.0") == "9.0"
    assert of("9.0", "8.0", "10.0") == "8.0"
    assert of("10.0", "9.0") == "8.9"
