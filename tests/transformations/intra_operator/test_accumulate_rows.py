from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.embedding import AddRows
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands
from daceml_train.transformations.intra_operator.accumulate_rows import AccumulateRows
from tests.transformations.checking import assert_text, check_refused, check_rewrite, check_same, program

OPERANDS = "g: f32[2, 4, 64], i: i64[2, 4], a: f32[100, 5], b: f32[5, 64]"
GRADIENT = "%d = embedding_grad(%g, %i, rows=100)\n"
TIED = "%c = matmul(%a, %b)\n" + GRADIENT + "%s = add(%d, %c)\n%y = exp(%s)"


def tied(result: str = "%y") -> Graph:
    """The gradient of a table that is also a linear layer's weight."""
    return program(OPERANDS, TIED, result)


def test_tied_weights() -> None:
    after = check_rewrite(tied(), AccumulateRows(), exact=False)
    assert_text(
        after,
        """\
        %matmul: f32[100, 64] = matmul(%a, %b)
        %add_rows: f32[100, 64] = add_rows(%matmul, %i, %g)
        %y: f32[100, 64] = exp(%add_rows)
        return %y
        """,
    )


def test_in_either_order() -> None:
    body = "%c = matmul(%a, %b)\n" + GRADIENT + "%y = add(%c, %d)"
    after = check_rewrite(program(OPERANDS, body, "%y"), AccumulateRows(), exact=False)
    assert_text(
        after,
        """\
        %matmul: f32[100, 64] = matmul(%a, %b)
        %add_rows: f32[100, 64] = add_rows(%matmul, %i, %g)
        return %add_rows
        """,
    )


def test_rows_are_added_where_the_sum_lies() -> None:
    """Only the rows named are touched, and no second table lives."""
    graph = AccumulateRows().run(tied())
    after = ReuseOperands(min_bytes=1).run(graph)
    (node,) = (n for n in after.nodes if isinstance(n.op, AddRows))
    assert node.op.in_place
    check_same(tied(), after, exact=False)
    table, rows = 100 * 64 * 4, 8 * 64 * 4
    assert traffic(graph).bytes - traffic(after).bytes == 2 * table - 2 * rows


def test_a_table_that_is_read_later_stays() -> None:
    body = TIED + "\n%z = add(%y, %c)"
    after = ReuseOperands(min_bytes=1).run(AccumulateRows().run(program(OPERANDS, body, "%z")))
    (node,) = (n for n in after.nodes if isinstance(n.op, AddRows))
    assert not node.op.in_place


def test_an_input_is_not_written_over() -> None:
    graph = program(
        "g: f32[2, 4, 64], i: i64[2, 4], c: f32[100, 64]", GRADIENT + "%s = add(%c, %d)\n%y = exp(%s)", "%y"
    )
    after = ReuseOperands(min_bytes=1).run(AccumulateRows().run(graph))
    (node,) = (n for n in after.nodes if isinstance(n.op, AddRows))
    assert not node.op.in_place


def test_what_is_handed_out_is_not_written_over() -> None:
    after = ReuseOperands(min_bytes=1).run(AccumulateRows().run(tied("%y, %c")))
    (node,) = (n for n in after.nodes if isinstance(n.op, AddRows))
    assert not node.op.in_place


def test_refused_for_a_padding_row() -> None:
    graph = program(OPERANDS, TIED.replace("rows=100", "rows=100, padding_idx=3"), "%y")
    check_refused(graph, AccumulateRows(), "row 3 of %d has no gradient, which add_rows does not know")


def test_refused_for_another_reader() -> None:
    graph = program(OPERANDS, TIED + "\n%z = exp(%d)", "%y, %z")
    check_refused(graph, AccumulateRows(), "the gradient %d has another reader")


def test_refused_for_itself() -> None:
    graph = program(OPERANDS, GRADIENT + "%y = add(%d, %d)", "%y")
    check_refused(graph, AccumulateRows(), "the gradient %d is added to itself")


def test_refused_where_a_kernel_makes_the_other_summand() -> None:
    graph = program(OPERANDS, TIED.replace("%c = matmul(%a, %b)", "%p = matmul(%a, %b)\n%c = mul(%p, %p)"), "%y")
    sentence = "%c is produced by an elementwise operator for this sum alone, which can read the gradient %d"
    check_refused(graph, AccumulateRows(), sentence)
