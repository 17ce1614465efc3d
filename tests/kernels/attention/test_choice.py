"""The choice of an implementation, and the reasons that are reported."""

import jax
import pytest

from kernels.attention.choice import Needs, UnsupportedError, choose, to_check
from kernels.attention.installed import missing
from tests.kernels.attention.gpus import A100, B200, H200, V100

CPU = jax.devices("cpu")[0]
SOFT_CAP = {"soft_cap": 30.0}
DOCUMENTS = {"has_documents": True}
CUT = {"is_cut": True}


def choice_of(asked="auto", device=H200, dtype="bfloat16", width=64, length=20, **changes):
    told = {name: changes.pop(name) for name in ("missing", "unproven") if name in changes}
    needs = Needs(dtype=dtype, head_width=width, length=length, **changes)
    return choose(asked, device, needs, **told)


def chosen(*args, **changes):
    return choice_of(*args, **changes).implementation


def test_cudnn_comes_first():
    assert chosen() == chosen(width=128) == chosen(device=A100) == chosen(width=24) == "cudnn"
    assert chosen(window=8) == chosen(width=256) == chosen(device=B200) == "cudnn"
    assert chosen("pallas") == "pallas"
    assert chosen("reference") == chosen(device=CPU) == "reference"


@pytest.mark.parametrize("change", [DOCUMENTS, CUT, {"deterministic": True}, SOFT_CAP], ids=str)
def test_other_kernels_are_taken_by_name_or_after_a_check(change):
    """Pallas on Hopper, and Triton where it can: it has no soft caps and no parts of sequences."""
    assert chosen(**change) == chosen(**change, unproven="anything") == "reference"
    assert chosen(**change, unproven=None) == chosen("pallas", **change) == "pallas"
    has_triton = change not in (CUT, SOFT_CAP)
    other = "triton" if has_triton else "reference"
    assert chosen(**change, device=A100) == "reference"
    for rest in ({"device": A100}, {"device": B200}, {"width": 72}):
        assert chosen(**change, **rest, unproven=None) == other
        if has_triton:
            assert chosen("triton", **change, **rest) == "triton"
    assert chosen(**change, device=V100, unproven=None) == "reference"
    assert chosen(**change, device=A100, window=8, unproven=None) == "reference"


def test_a_check_is_named_where_it_decides():
    needs = lambda **changes: Needs(dtype="bfloat16", head_width=128, length=20, **changes)
    assert to_check(H200, needs()) is to_check(A100, needs()) is None  # cuDNN
    assert to_check(H200, needs(**DOCUMENTS)) == "pallas"
    assert to_check(A100, needs(**DOCUMENTS)) == "triton"
    assert to_check(A100, needs(**CUT)) is to_check(CPU, needs(**DOCUMENTS)) is None


def test_the_reason_is_told():
    assert str(choice_of()) == "cuDNN (the first that can compute it)"
    assert str(choice_of("pallas")) == "the Pallas kernels (kernels.attention asks for it)"
    why = "cuDNN has no documents: supported is attention to all that came before"
    assert str(choice_of(has_documents=True, unproven=None)) == f"the Pallas kernels ({why})"
    lack = "have no passed check on this machine"
    told = f"plain JAX ({why}; the Pallas kernels {lack}; JAX's Triton kernels {lack})"
    assert str(choice_of(has_documents=True)) == told
    assert str(choice_of(device=CPU)) == "plain JAX (on cpu devices there is nothing else)"


def test_what_is_not_installed_is_not_taken():
    lacks = {"cudnn": "library here", "triton": "place in JAX 1.0"}
    assert chosen(device=A100, missing=lacks.get, unproven=None) == "reference"
    assert chosen(device=H200, missing=lacks.get, unproven=None) == "pallas"
    with pytest.raises(UnsupportedError, match="library here"):
        chosen("cudnn", missing=lacks.get)


def test_an_odd_length_is_refused_by_the_name_of_cudnn_alone():
    """`auto` adds a token that nothing sees (`test_cudnn`)."""
    assert chosen(length=397) == chosen("cudnn", length=398) == "cudnn"
    with pytest.raises(UnsupportedError, match="of an odd length, 397 tokens"):
        chosen("cudnn", length=397)
    assert chosen("pallas", length=397) == "pallas"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": CPU}, "cpu devices: supported are NVIDIA GPUs"),
        ({"dtype": "float32"}, "float32: supported are bfloat16, float16"),
        ({"device": V100}, "NVIDIA V100 devices: supported are NVIDIA GPUs from Ampere on"),
        ({"width": 264}, "heads 264 wide: supported are multiples of 8 up to 256"),
        ({"width": 136, "device": A100}, "heads 136 wide: supported are multiples of 8 up to 128"),
        (SOFT_CAP, "soft cap of scores"),
        (CUT, "sequences that several devices share"),
        ({"deterministic": True}, "gradients of the same bits each time"),
        (DOCUMENTS, "documents: supported is attention to all that came before"),
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


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": V100}, "NVIDIA V100 devices: supported are NVIDIA GPUs from Ampere on"),
        ({"dtype": "float32"}, "float32: supported are bfloat16, float16"),
        ({"width": 256}, "heads 256 wide: supported are those up to 128"),
        ({"window": 8}, "windows"),
        (SOFT_CAP, "soft cap of scores"),
        (CUT, "sequences that several devices share"),
    ],
)
def test_triton_refuses(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        chosen("triton", **change)


def test_without_cudnn_a_gpu_computes_plain_jax():
    """No cuDNN is installed where tests run, and this JAX has Triton kernels."""
    reason = choice_of(device=A100, missing=missing).reason
    assert reason.startswith("cuDNN has no library that JAX finds here: ")
    assert reason.endswith("JAX's Triton kernels have no passed check on this machine")
    assert missing("triton") is missing("pallas") is None
