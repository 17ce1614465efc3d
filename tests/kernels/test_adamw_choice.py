"""The choice between the kernel of AdamW's step and XLA, and the reasons that are reported."""

import jax
import pytest

from kernels import adamw_choice
from kernels.adamw_choice import MeasuredStep, choose_optimizer, depends_on_check
from kernels.attention.choice import UnsupportedError
from tests.kernels.attention.gpus import A100, B200, H200

CPU = jax.devices("cpu")[0]
FASTER = MeasuredStep("NVIDIA H200", "int8", 3900.0, 3100.0, "2026-12-01, commit 0123456")
SLOWER = FASTER._replace(moments="float32", kernel_gb_per_s=3000.0)


def chosen(asked="auto", device=H200, moments="int8", **more):
    return choose_optimizer(asked, device, moments, **more)


def test_auto_is_xla_until_a_row_shows_the_kernel_faster():
    """For that kind of device and that format, and after a check on the machine."""
    never = "XLA (the kernel with moments in int8 has not been measured on NVIDIA H200)"
    assert str(chosen(unproven=None)) == never
    rows = {"measured": [SLOWER, FASTER]}
    faster = "the Pallas kernel (it is faster: 3900 beside 3100 GB/s, 2026-12-01, commit 0123456)"
    assert str(chosen(**rows, unproven=None)) == faster
    lack = "XLA (the Pallas kernel has no passed check on this machine)"
    assert str(chosen(**rows)) == lack
    slower = "XLA (the kernel is not faster: 3000 beside 3100 GB/s, 2026-12-01, commit 0123456)"
    assert str(chosen(**rows, unproven=None, moments="float32")) == slower
    for others in ({"moments": "bfloat16"}, {"device": B200}, {"device": A100}, {"device": CPU}):
        assert chosen(**rows, unproven=None, **others).implementation == "xla"
    narrow = chosen(**rows, unproven=None, parameters="bfloat16")
    assert str(narrow) == "XLA (the kernel with parameters in bfloat16 has not been measured)"
    later = FASTER._replace(kernel_gb_per_s=3099.0)
    assert chosen(measured=[FASTER, later], unproven=None).implementation == "xla"


def test_a_name_is_taken_or_refused():
    assert chosen("xla", measured=[FASTER], unproven=None).implementation == "xla"
    assert str(chosen("pallas")) == "the Pallas kernel (kernels.optimizer asks for it)"
    for device in (A100, B200, CPU):
        with pytest.raises(UnsupportedError, match="supported are NVIDIA Hopper GPUs"):
            chosen("pallas", device)
    assert chosen("pallas", parameters="bfloat16").implementation == "pallas"


def test_a_check_is_needed_only_where_a_row_makes_it_decide(monkeypatch):
    assert not depends_on_check(H200, "int8")
    monkeypatch.setattr(adamw_choice, "MEASURED", (SLOWER, FASTER))
    assert depends_on_check(H200, "int8")
    assert not depends_on_check(H200, "float32")
    assert not depends_on_check(A100, "int8")
