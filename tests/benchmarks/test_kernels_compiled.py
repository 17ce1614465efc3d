"""GPU kernels compiled down to machine code, where that can be done."""

import pytest

from benchmarks import kernels_compiled
from benchmarks.kernels_compiled import CONFIGURATIONS, FOLDER, Attention, Update

LOG = """wgmma 12
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention_dq' for 'sm_90a'
ptxas info    : Function properties for attention_dq
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 144 registers, used 1 barriers
ptxas info    : Compile time = 9.281 ms
wgmma 8
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention_forward' for 'sm_90a'
ptxas info    : Function properties for attention_forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 99 registers, used 1 barriers
wgmma 0
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fusion' for 'sm_90a'
ptxas info    : Function properties for fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers
"""


def test_what_the_assembler_says_is_read():
    assert kernels_compiled.kernels_in(LOG) == {
        "attention_dq": {"registers": 144, "spilled": 12, "wgmma": 12, "one_by_one": False},
        "attention_forward": {"registers": 99, "spilled": 0, "wgmma": 8, "one_by_one": True},
    }


@pytest.mark.parametrize(
    "kernel, dtype, good",
    [
        ({}, "bfloat16", True),
        ({"spilled": 64}, "bfloat16", True),
        ({"spilled": 68}, "bfloat16", False),
        ({"wgmma": 0}, "bfloat16", False),
        ({"one_by_one": True}, "bfloat16", False),
        ({"wgmma": 0}, "float32", True),
    ],
)
def test_what_is_good(kernel, dtype, good):
    fine = {"registers": 200, "spilled": 0, "wgmma": 8, "one_by_one": False}
    kernels = {"attention_forward": fine, "attention_dq": fine, "attention_dkv": {**fine, **kernel}}
    configuration = Attention("triton", dtype, 64, "causal", False)
    number = CONFIGURATIONS.index(configuration)
    line = {"number": number, "what": configuration.label, "kernels": kernels, "error": None}
    assert kernels_compiled.is_good(line) == good
    assert not kernels_compiled.is_good({**line, "error": "out of shared memory"})
    assert not kernels_compiled.is_good({**line, "kernels": {}})
    assert (
        f"| attention, triton, {dtype}, 64 wide, causal | `attention_dkv` | 200 |"
        in kernels_compiled.table([line])
    )


@pytest.mark.skipif(not FOLDER.exists(), reason="run python -m benchmarks.kernels_compiled once")
@pytest.mark.parametrize(
    "configuration",
    [
        Attention("triton", "bfloat16", 128, "causal", False),
        Attention("mosaic", "bfloat16", 64, "causal", True),
        Update("int8", 8),
    ],
    ids=lambda configuration: configuration.label,
)
def test_kernels_compile_for_an_h200(configuration):
    number = CONFIGURATIONS.index(configuration)
    [line] = kernels_compiled.compile_in_a_process(FOLDER, [number])
    assert kernels_compiled.is_good(line), line


@pytest.mark.skipif(not FOLDER.exists(), reason="run python -m benchmarks.kernels_compiled once")
def test_a_joint_backward_compiles_for_an_h200():
    """Addresses of its stores spill."""
    number = CONFIGURATIONS.index(Attention("mosaic", "bfloat16", 128, "causal", False))
    [line] = kernels_compiled.compile_in_a_process(FOLDER, [number])
    assert line["error"] is None
    assert set(line["kernels"]) == {"attention_forward", "attention_joint"}
    assert line["kernels"]["attention_joint"]["wgmma"] == 3 * 32  # in three loops
