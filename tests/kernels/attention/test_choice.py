"""The choice of an implementation, and the reasons that are reported."""

import jax
import pytest

from kernels.attention import choice
from kernels.attention.choice import UnsupportedError, choose
from kernels.attention.tiles import Rule
from tests.kernels.attention.gpus import A100, B200, H200, V100

CPU = jax.devices("cpu")[0]
SOFT_CAP = Rule(soft_cap=30.0)


def choice_of(asked="auto", device=H200, dtype="bfloat16", width=64, **changes):
    q, k = (jax.ShapeDtypeStruct((2, 20, heads, width), dtype) for heads in (4, 2))
    told = {"rule": Rule(), "has_segments": False, "is_cut": False, "deterministic": False}
    return choose(asked, device, q, k, k, **told | changes)


def chosen(*args, **changes):
    return choice_of(*args, **changes).implementation


@pytest.fixture
def cudnn(monkeypatch):
    """A machine where JAX finds cuDNN."""
    monkeypatch.setattr(choice, "_cudnn_is_missing", lambda: None)


@pytest.mark.usefixtures("cudnn")
def test_cudnn_comes_first():
    assert chosen() == chosen(width=128) == chosen(device=A100) == chosen(width=24) == "cudnn"
    assert chosen(rule=Rule(window=8)) == chosen(width=256) == chosen(device=B200) == "cudnn"
    assert chosen("pallas") == "pallas"
    assert chosen("reference") == chosen(device=CPU) == "reference"


OTHERS = {"has_segments": True}, {"is_cut": True}, {"deterministic": True}, {"rule": SOFT_CAP}


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_kernels_that_never_ran_are_taken_by_name_or_after_a_check(change):
    assert chosen(**change) == chosen(**change, unproven="anything") == "reference"
    assert chosen(**change, unproven=None) == chosen("pallas", **change) == "pallas"
    assert chosen(**change, unproven=None, device=A100) == "reference"
    assert chosen(**change, unproven=None, width=72) == "reference"


@pytest.mark.usefixtures("cudnn")
def test_the_reason_is_told():
    assert str(choice_of()) == "cuDNN (the first that can compute it)"
    assert str(choice_of("pallas")) == "the Pallas kernels (kernels.attention asks for it)"
    why = "cuDNN has no documents: supported is attention to all that came before"
    assert str(choice_of(has_segments=True, unproven=None)) == f"the Pallas kernels ({why})"
    why += "; the Pallas kernels have no passed check on this machine"
    assert str(choice_of(has_segments=True)) == f"plain JAX ({why})"
    assert str(choice_of(device=CPU)) == "plain JAX (on cpu devices there is nothing else)"


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": CPU}, "cpu devices: supported are NVIDIA GPUs"),
        ({"dtype": "float32"}, "float32: supported are bfloat16, float16"),
        ({"device": V100}, "NVIDIA V100 devices: supported are NVIDIA GPUs from Ampere on"),
        ({"width": 264}, "heads 264 wide: supported are multiples of 8 up to 256"),
        ({"width": 136, "device": A100}, "heads 136 wide: supported are multiples of 8 up to 128"),
        ({"rule": SOFT_CAP}, "soft cap of scores"),
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


def test_without_cudnn_a_gpu_computes_plain_jax():
    """No cuDNN is installed where tests run."""
    reason = choice_of(device=A100).reason
    assert reason.startswith("cuDNN has no library that JAX finds here: ")
    assert reason.endswith("have no NVIDIA A100 devices: supported are NVIDIA Hopper GPUs")
