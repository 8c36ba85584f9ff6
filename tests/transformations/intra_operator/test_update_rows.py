"""Rows of a table updated where they lie: picture, refusals, and the update in place after it."""

import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from daceml_train.transformations.intra_operator.update_rows import UpdateRows
from tests.transformations.checking import assert_text, check_refused, check_rewrite, check_same, program

SIGNATURE = "p: f32[90, 4], g: f32[5, 4], i: i64[5], rate: f64[], b: f32[90, 4]"


def test_rows() -> None:
    body = """
        %d = embedding_grad(%g, %i, rows=90)
        %n = sgd_update(%p, %d, %rate)
    """
    after = check_rewrite(program(SIGNATURE, body, "%n"), UpdateRows(), exact=False)
    assert_text(
        after,
        """\
        %cast: f32[] = cast(%rate, dtype=f32)
        %neg: f32[] = neg(%cast)
        %mul: f32[5, 4] = mul(%g, %neg)
        %add_rows: f32[90, 4] = add_rows(%p, %i, %mul)
        return %add_rows
        """,
    )


def test_rows_that_repeat_are_scaled_once() -> None:
    body = """
        %one = view(%g, shape=(5, 1, 4))
        %all = expand(%one, shape=(5, 2, 4))
        %d = embedding_grad(%all, %i, rows=90)
        %n = sgd_update(%p, %d, %rate, maximize=True)
    """
    signature = SIGNATURE.replace("i64[5]", "i64[5, 2]")
    after = check_rewrite(program(signature, body, "%n"), UpdateRows(), exact=False)
    assert_text(
        after,
        """\
        %one: f32[5, 1, 4] = view(%g, shape=(5, 1, 4))
        %cast: f32[] = cast(%rate, dtype=f32)
        %mul: f32[5, 1, 4] = mul(%one, %cast)
        %expand: f32[5, 2, 4] = expand(%mul, shape=(5, 2, 4))
        %add_rows: f32[90, 4] = add_rows(%p, %i, %expand)
        return %add_rows
        """,
    )


@pytest.mark.parametrize(
    "option, padding, also, sentence",
    [
        ("momentum=0.9", "", "", "momentum changes rows of %p that the batch does not name"),
        ("weight_decay=0.1", "", "", "weight decay changes rows of %p that the batch does not name"),
        ("maximize=True", ", padding_idx=0", "", "row 0 of %p has no gradient, which add_rows does not know"),
        ("maximize=True", "", ", %d", "the gradient %d has another reader"),
    ],
)
def test_refusals(option: str, padding: str, also: str, sentence: str) -> None:
    result, buffer = ("%n, %m", ", %b") if "momentum" in option else ("%n", "")
    body = f"""
        %d = embedding_grad(%g, %i, rows=90{padding})
        {result} = sgd_update(%p, %d, %rate{buffer}, {option})
    """
    check_refused(program(SIGNATURE, body, f"%n{also}"), UpdateRows(), sentence)


def test_in_place() -> None:
    graph = program("p: f32[90, 4], g: f32[5, 4], i: i64[5]", "%n = add_rows(%p, %i, %g)")
    graph.write("p", graph.value("n"))
    after = UpdateInPlace().run(graph)
    assert after.nodes[0].op.updates == ((0, 0),)
    assert traffic(graph).bytes == 4 * (4 * 90 * 4) + 5 * 4 * 4 + 5 * 8  # out of place, then copied
    assert traffic(after).bytes == 3 * (5 * 4 * 4) + 5 * 8
    check_same(graph, after)
