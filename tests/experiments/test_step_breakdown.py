"""Which part of a step an operation of a profile belongs to, by the compiled program's text."""

from step_breakdown import parts_of

PROGRAM = """HloModule step
%wrapped_dynamic-slice.7 (p: s32[], q: bf16[2,3]) -> bf16[1,3] {
  %p = s32[] parameter(0)
  ROOT %dynamic-slice.3 = bf16[1,3] dynamic-slice(%q, %p), metadata={op_name="jit(step)/experts/loads/dynamic_slice"}
}
ENTRY %main (a: f32[2]) -> f32[2] {
  %fusion.1 = f32[2] fusion(%a), metadata={op_name="jit(step)/attention/dot"}
  ROOT %add = f32[2] add(%a, %a)
}"""


def test_operations_belong_to_their_innermost_scope():
    parts = parts_of(PROGRAM)
    assert parts["fusion.1"] == "attention"
    assert parts["dynamic-slice.3"] == "loads"
    assert parts["add"] == "other"


def test_asynchronous_operations_go_by_the_computation_that_they_run():
    assert parts_of(PROGRAM)["wrapped_dynamic-slice.7"] == "loads"
