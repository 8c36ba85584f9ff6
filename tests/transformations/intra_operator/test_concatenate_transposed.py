import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.ops.movement import Concat
from daceml_train.transformations.intra_operator.concatenate_transposed import ConcatenateTransposed
from tests.transformations.checking import check_refused, check_rewrite, program

SIGNATURE = "a: f32[1, 2, 3, 5, 4], b: f32[1, 2, 3, 5, 4], w: f32[24, 7]"
BODY = """%y = concat(%a, %b, dim=0)
%p = permute(%y, dims=(1, 3, 0, 2, 4))
%v = view(%p, shape=(10, 24))
%z = matmul(%v, %w)"""


def test_the_transposed_result_is_not_copied() -> None:
    before = program(SIGNATURE, BODY, "%z")
    after = check_rewrite(before, ConcatenateTransposed())
    (joined,) = [node for node in after.nodes if isinstance(node.op, Concat)]
    assert joined.op.dim == 2 and after.tensors[joined.outputs[0]].order is None
    array = 2 * 2 * 3 * 5 * 4 * 4
    assert traffic(before).bytes - traffic(after).bytes == 2 * array
    assert [m.traffic for m in ConcatenateTransposed().matches(before)] == [-2 * array]


def test_operands_that_are_transposed_already() -> None:
    """Results of an attention kernel lie as [B, T, H, E]; the concatenation reads them in the order of memory."""
    body = "%c = permute(%k, dims=(0, 2, 1, 3))\n%a = view(%c, shape=(1, 2, 3, 5, 4))\n" + BODY
    before = program("k: f32[2, 5, 3, 4], b: f32[1, 2, 3, 5, 4], w: f32[24, 7]", body, "%z")
    check_rewrite(before, ConcatenateTransposed())


def test_symbolic_sizes() -> None:
    signature = SIGNATURE.replace("f32[1, 2, ", "f32[1, s0, ")
    check_rewrite(program(signature, BODY.replace("(10, 24)", "(5*s0, 24)"), "%z"), ConcatenateTransposed(), s0=3)


@pytest.mark.parametrize("name", ["y", "p"])
def test_other_readers(name: str) -> None:
    body = f"{BODY}\n%other = exp(%{name})"
    check_refused(
        program(SIGNATURE, body, "%z, %other"),
        ConcatenateTransposed(),
        f"%{name} has other readers, which want it as it is",
    )


def test_views_that_copy_nothing_stay() -> None:
    rows = BODY.replace("(1, 3, 0, 2, 4)", "(0, 1, 2, 3, 4)").replace("(10, 24)", "(10, 24)")
    assert ConcatenateTransposed().matches(program(SIGNATURE, rows, "%z")) == []
