"""The products of a compiled program are counted by the dtypes of their operands."""

from benchmarks.fp8_compiled import (
    fast_in,
    is_good,
    products_in,
    small_all_reduces,
    transposes_in,
)

TEXT = """
%gemm (parameter_0: f8e4m3fn[64,32], parameter_1: f8e5m2[32,16]) -> bf16[64,16] {
  %parameter_0 = f8e4m3fn[64,32]{1,0} parameter(0)
  %parameter_1 = f8e5m2[32,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,16]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}
}
ENTRY %main {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %cublas = (bf16[8,8]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  %other = bf16[8]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2"
  %max = (f32[], f32[]) all-reduce(%x, %y), to_apply=%region
  %joined = f32[21]{0} all-reduce-start(%z), to_apply=%region
  %sum = f32[2048,8]{1,0} all-reduce(%z), to_apply=%region
}
"""


def test_products_and_small_all_reduces_are_counted():
    assert products_in(TEXT) == {("f8e4m3fn", "f8e5m2"): 1, ("bf16", "f32"): 1}
    assert small_all_reduces(TEXT) == 2


# As XLA writes a call of cuBLAS, a kernel that codes and transposes, and two that transpose alone.
AFTER = """
%fused (param_0: bf16[64,32]) -> f8e5m2[32,64] {
  %param_0 = bf16[64,32]{1,0} parameter(0)
  %codes.1 = f8e5m2[64,32]{1,0} convert(%param_0)
  %same.1 = f8e5m2[64,32]{1,0} bitcast(%codes.1)
  ROOT %turned = f8e5m2[32,64]{1,0} transpose(%same.1), dimensions={1,0}
}
%wrapped (param_1: f8e4m3fn[64,32]) -> f8e4m3fn[32,64] {
  %param_1 = f8e4m3fn[64,32]{1,0} parameter(0)
  %same.2 = f8e4m3fn[64,32]{1,0} bitcast(%param_1)
  ROOT %turned.1 = f8e4m3fn[32,64]{1,0} transpose(%same.2), dimensions={1,0}
}
ENTRY %main {
  %a = f8e5m2[64,32]{1,0} parameter(0)
  %b = f8e4m3fn[16,32]{1,0} parameter(1)
  %same = f8e4m3fn[16,32]{1,0} copy(%b)
  %other = f8e4m3fn[16,32]{0,1} copy(%b)
  %p = (bf16[64,16]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}
  %q = (bf16[64,16]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}
  %r = bf16[16,16]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %s = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, operand_precision={highest,highest}
}
"""  # noqa: E501


def test_fast_sums_and_transpositions_are_counted():
    assert fast_in(AFTER) == 1  # q
    assert transposes_in(AFTER) == 2  # turned.1, other


def test_what_is_good():
    fp8 = {"in_fp8": True, "forward": 4, "backward": 8, "others": {}, "fast": 0, "transposes": 0}
    assert is_good(fp8)
    assert not is_good({**fp8, "others": {"bf16 bf16": 1}})
    assert not any(is_good({**fp8, name: 1}) for name in ("fast", "transposes"))
    assert not is_good({**fp8, "backward": 0})
    assert not is_good({**fp8, "in_fp8": False})
