"""The choice of an implementation, and the reasons that are reported."""

import jax
import pytest

from kernels.attention import choice
from kernels.attention.choice import UnsupportedError, choose
from tests.kernels.attention.gpus import A100, H200

CPU = jax.devices("cpu")[0]


def chosen(asked="auto", device=H200, dtype="bfloat16", width=64, **changes):
    q, k = (jax.ShapeDtypeStruct((2, 20, heads, width), dtype) for heads in (4, 2))
    told = {"has_segments": False, "is_cut": False, "deterministic": False, **changes}
    return choose(asked, device, q, k, k, **told)


@pytest.fixture
def cudnn(monkeypatch):
    """A machine where JAX finds cuDNN."""
    monkeypatch.setattr(choice, "_cudnn_is_missing", lambda: None)


@pytest.mark.usefixtures("cudnn")
def test_the_first_that_can_compute_the_arrays_is_chosen():
    assert chosen() == chosen(width=128) == chosen(device=A100) == chosen(width=24) == "cudnn"
    others = {"has_segments": True}, {"is_cut": True}, {"deterministic": True}, {"width": 256}
    for change in others:
        assert chosen(**change) == "pallas"
        assert chosen(**change, device=A100) == "reference"
    assert chosen(dtype="float32") == "reference"
    assert chosen(width=256, deterministic=True) == "reference"
    assert chosen("pallas") == "pallas"
    assert chosen("reference") == chosen(device=CPU) == "reference"


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": CPU}, "cpu devices: supported are NVIDIA GPUs"),
        ({"dtype": "float32"}, "float32: supported are bfloat16, float16"),
        ({"width": 136}, "heads 136 wide: supported are multiples of 8 up to 128"),
        ({"is_cut": True}, "sequences that several devices share"),
        ({"deterministic": True}, "gradients of the same bits each time"),
        ({"has_segments": True}, "documents: supported is attention to all that came before"),
    ],
)
def test_cudnn_refuses(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        chosen("cudnn", **change)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": CPU}, "cpu devices: supported are NVIDIA Hopper GPUs"),
        ({"device": A100}, "NVIDIA A100 devices: supported are NVIDIA Hopper GPUs"),
        ({"width": 32}, "heads 32 wide: supported are 64, 128, 256"),
    ],
)
def test_pallas_refuses(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        chosen("pallas", **change)


def test_auto_says_once_why_a_gpu_computes_plain_jax(caplog):
    """No cuDNN is installed where tests run."""
    choice._warn_once.cache_clear()
    for _ in range(2):
        assert chosen(device=A100) == "reference"
    assert chosen(width=12) == "reference"
    one, other = (record.message for record in caplog.records)
    assert one.startswith("attention runs as plain JAX: cudnn has no library that JAX finds here: ")
    assert one.endswith("; pallas has no NVIDIA A100 devices: supported are NVIDIA Hopper GPUs")
    assert other == (
        "attention runs as plain JAX: "
        "cudnn has no heads 12 wide: supported are multiples of 8 up to 128; "
        "pallas has no heads 12 wide: supported are 64, 128, 256"
    )
