"""GPU kernels compiled down to machine code, where that can be done."""

import pytest

from benchmarks import kernels_compiled
from benchmarks.kernels_compiled import CONFIGURATIONS, FOLDER, AdamW, Attention

PRINTED = """
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'forward_kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_kernel_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
    mul.rn.f32 \t%f1, %f2, %f3;
    fma.rn.f32 \t%f4, %f1, %f2, %f3;
    div.full.f32 \t%f5, %f4, %f2;
ptxas info    : Compiling entry function '__joint_kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for __joint_kernel_mosaic_gpu_kernel
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 144 registers, used 9 barriers
"""


def test_what_the_assembler_says_is_read():
    names = ("registers", "spilled", "wgmma", "one_by_one", "unrounded")
    assert kernels_compiled.kernels_in(PRINTED) == {
        "attention_forward": dict(zip(names, (168, 0, 2, True, 0), strict=True)),
        "attention_joint": dict(zip(names, (144, 12, 1, False, 2), strict=True)),
    }


@pytest.mark.parametrize(
    "kernel, good",
    [
        ({}, True),
        ({"spilled": 64}, True),
        ({"spilled": 68}, False),
        ({"wgmma": 0}, False),
        ({"one_by_one": True}, False),
    ],
)
def test_what_is_good(kernel, good):
    fine = {"registers": 200, "spilled": 0, "wgmma": 8, "one_by_one": False}
    kernels = {"attention_forward": fine, "attention_joint": {**fine, **kernel}}
    configuration = Attention("bfloat16", 64, "causal", False)
    number = CONFIGURATIONS.index(configuration)
    line = {"number": number, "what": configuration.label, "kernels": kernels, "error": None}
    assert kernels_compiled.is_good(line) == good
    assert not kernels_compiled.is_good({**line, "error": "out of shared memory"})
    assert not kernels_compiled.is_good({**line, "kernels": {}})
    row = "| attention, bfloat16, 64 wide, causal | `attention_joint` | 200 |"
    assert row in kernels_compiled.table([line])


def test_an_update_is_good_in_place():
    number = CONFIGURATIONS.index(AdamW("int8", True))
    kernel = {"registers": 96, "spilled": 0, "wgmma": 0, "one_by_one": False, "unrounded": 0}
    line = {"number": number, "error": None, "temporary_bytes": 800, "kernels": {"adamw": kernel}}
    assert kernels_compiled.is_good(line)
    assert not kernels_compiled.is_good({**line, "temporary_bytes": 4 * 2**22})
    for wrong in ({"spilled": 68}, {"unrounded": 1}):
        assert not kernels_compiled.is_good({**line, "kernels": {"adamw": {**kernel, **wrong}}})


@pytest.mark.skipif(not FOLDER.exists(), reason="run python -m benchmarks.kernels_compiled once")
def test_updates_compile_for_an_h200():
    numbers = [
        n for n, configuration in enumerate(CONFIGURATIONS) if isinstance(configuration, AdamW)
    ]
    for line in kernels_compiled.compile_in_a_process(FOLDER, numbers):
        assert kernels_compiled.is_good(line), line


@pytest.mark.skipif(not FOLDER.exists(), reason="run python -m benchmarks.kernels_compiled once")
def test_kernels_compile_for_an_h200():
    number = CONFIGURATIONS.index(Attention("bfloat16", 64, "causal", True))
    [line] = kernels_compiled.compile_in_a_process(FOLDER, [number])
    assert kernels_compiled.is_good(line), line


@pytest.mark.skipif(not FOLDER.exists(), reason="run python -m benchmarks.kernels_compiled once")
def test_a_joint_backward_compiles_for_an_h200():
    """Addresses of its stores spill."""
    number = CONFIGURATIONS.index(Attention("bfloat16", 64, "causal", False))
    [line] = kernels_compiled.compile_in_a_process(FOLDER, [number])
    assert line["error"] is None
    assert set(line["kernels"]) == {"attention_forward", "attention_joint"}
    joint = line["kernels"]["attention_joint"]
    assert joint["wgmma"] > 0
    assert not joint["one_by_one"]
