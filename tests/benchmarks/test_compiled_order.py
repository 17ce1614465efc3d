"""The overlap of a program of a few instructions, worked by hand."""

import pytest

from benchmarks.compiled_order import (
    FLOP_PER_S,
    LINK_BYTES_PER_S,
    MEMORY_BYTES_PER_S,
    Program,
)

# A product of [4096, 4096] matrices beside a gather, in a loop of three; then a sum that nothing
# hides, and a transpose.
TEXT = """
HloModule jit_step, is_scheduled=true

%product (p.0: bf16[4096,4096], p.1: bf16[4096,4096]) -> bf16[4096,4096] {
  %p.0 = bf16[4096,4096]{1,0} parameter(0)
  %p.1 = bf16[4096,4096]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4096,4096]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}
}

%turned (p.2: bf16[4096,4096]) -> bf16[4096,4096] {
  %p.2 = bf16[4096,4096]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[4096,4096]{1,0} transpose(%p.2), dimensions={1,0}
}

%body (state: (bf16[4096,4096], bf16[512,4096])) -> (bf16[4096,4096], bf16[512,4096]) {
  %state = (bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) parameter(0)
  %x = bf16[4096,4096]{1,0} get-tuple-element(%state), index=0
  %w = bf16[512,4096]{1,0} get-tuple-element(%state), index=1
  %all-gather-start = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%w), \
replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  %fusion.1 = bf16[4096,4096]{1,0} fusion(%x, %x), kind=kCustom, calls=%product
  %all-gather-done = bf16[4096,4096]{1,0} all-gather-done(%all-gather-start)
  ROOT %tuple.1 = (bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%fusion.1, %w)
}

ENTRY %main (a: bf16[4096,4096], b: bf16[512,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[512,4096]{1,0} parameter(1)
  %tuple.2 = (bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%a, %b)
  %while.1 = (bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) while(%tuple.2), condition=%c, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %y = bf16[4096,4096]{1,0} get-tuple-element(%while.1), index=0
  %all-reduce-start = bf16[4096,4096]{1,0} all-reduce-start(%y), replica_groups={{0,1,2,3}}
  %all-reduce-done = bf16[4096,4096]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %fusion.2 = bf16[4096,4096]{1,0} fusion(%all-reduce-done), kind=kLoop, calls=%turned
}
"""


def test_what_a_program_waits_for_is_worked_by_hand():
    matrix = 2 * 4096**2
    product_s = 2 * 4096**3 / FLOP_PER_S
    gather_s = matrix * 7 / 8 / LINK_BYTES_PER_S
    sum_s = 2 * matrix * 3 / 4 / LINK_BYTES_PER_S
    assert product_s > gather_s
    found = Program(TEXT).overlap()
    assert (found.num_async, found.num_bare) == (1, 1)
    assert found.collective_s == pytest.approx(3 * gather_s + sum_s)
    assert found.exposed_s == pytest.approx(sum_s)
    assert found.compute_s == pytest.approx(3 * product_s + 2 * matrix / MEMORY_BYTES_PER_S)
    assert found.moved_bytes == matrix
    late = TEXT.replace("calls=%product", "calls=%turned").replace("fusion(%x, %x)", "fusion(%x)")
    waits = Program(late).overlap()  # a transpose hides little of the gather
    turned_s = 2 * matrix / MEMORY_BYTES_PER_S
    assert waits.exposed_s == pytest.approx(3 * (gather_s - turned_s) + sum_s)
