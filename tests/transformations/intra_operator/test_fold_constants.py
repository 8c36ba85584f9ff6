import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.transformations.intra_operator.fold_constants import FoldConstants
from tests.transformations.checking import check_same, program
from tests.transformations.intra_operator.test_simplify import one

TWO = one(2.0, "(3, 4)") + one(3.0, "()").replace("%c", "%d")
CASES = {
    "elementwise": (TWO + "%y = mul(%c, %d)", "full(value=6.0, shape=(3, 4))"),
    "comparison": (TWO + "%y = lt(%c, %d)", "full(value=True, shape=(3, 4), dtype=b1)"),
    "chain": (TWO + "%a = exp(%c)\n%b = log(%a)\n%y = add(%b, %d)", "full(value=5.0, shape=(3, 4))"),
    "infinite": (one(0.0) + "%y = log(%c)", "full(value=-inf)"),
    "cast": (one(2.7, "(3,)") + "%y = cast(%c, dtype=i64)", "full(value=2, shape=(3,), dtype=i64)"),
    "cast to a wider type": (one(1.1) + "%y = cast(%c, dtype=f64)", "full(value=1.100000023841858, dtype=f64)"),
    "comparison of what is rounded": (
        "".join(one(x).replace("%c", f"%{n}") for x, n in ((0.1, "c"), (3.0, "d"), (0.3, "e")))
        + "%p = mul(%c, %d)\n%y = eq(%p, %e)",
        "full(value=True, dtype=b1)",
    ),
    "floor of what is rounded": (
        one(0.29) + one(100.0).replace("%c", "%d") + "%p = mul(%c, %d)\n%y = floor(%p)",
        "full(value=29.0)",
    ),
    "out of range": (
        "%c = full(value=-1, shape=(3,), dtype=u8)\n%d = full(value=200, dtype=i8)\n%e = cast(%d, dtype=u8)\n"
        "%y = add(%c, %e)",
        "full(value=199, shape=(3,), dtype=u8)",
    ),
    "view": (one(2.0, "(3, 4)") + "%y = view(%c, shape=(12,))", None),
    "expand": (one(2.0) + "%y = expand(%c, shape=(s0, 2))", None),
    "sum of expand": (
        one(2.0) + '%e = expand(%c, shape=(3, s0))\n%y = reduce(%e, kind="sum", dims=(0,))',
        "full(value=6.0, shape=(s0,))",
    ),
    "through aliases": (
        one(2.0, "(3, 4)")
        + """%v = view(%c, shape=(12,))
        %s = slice(%v, dim=0, start=1, stop=3)
        %e = expand(%s, shape=(s0, 2))
        %y = mul(%x, %e)""",
        "mul(%x, %full)",
    ),
    "pad": (one(0.0, "(3,)") + "%y = pad(%c, pads=((1, 1),))", "full(value=0.0, shape=(5,))"),
    "pad with another value": (one(-0.0, "(3,)") + "%y = pad(%c, pads=((1, 1),))", None),
    "concat": (one(2.0, "(3,)") + "%y = concat(%c, %c, dim=0)", "full(value=2.0, shape=(6,))"),
    "concat of two values": (
        one(2.0, "(3,)") + one(1.0, "(3,)").replace("%c", "%d") + "%y = concat(%c, %d, dim=0)",
        None,
    ),
    "sum": (one(2.0, "(3, 4)") + '%y = reduce(%c, kind="sum", dims=(0,))', "full(value=6.0, shape=(4,))"),
    "sum that rounds": (one(0.1, "(3, 4)") + '%y = reduce(%c, kind="sum", dims=(0,))', None),
    "sum that is too large": (one(1.0, "(16777217,)") + '%y = reduce(%c, kind="sum", dims=(0,))', None),
    "sum of unknown size": (one(1.0, "(s0,)") + '%y = reduce(%c, kind="sum", dims=(0,))', None),
    "max": (one(0.1, "(s0, 4)") + '%y = reduce(%c, kind="max", dims=(0,))', "full(value=0.1, shape=(4,))"),
    "nan": (one(-1.0) + "%y = sqrt(%c)", None),
    "scalar operand": (one(2.0, "(s0, 2)") + "%y = mul(%x, %c)", "mul(%x, %full)"),
    "operand that gives the shape": (one(2.0, "(3, s0, 2)") + "%y = mul(%x, %c)", None),
    "value over sizes": (one("s0") + "%y = exp(%c)", None),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    body, expected = CASES[name]
    graph = program("x: f32[s0, 2]", body, "%y")
    folded = FoldConstants().run(graph)
    if expected is None:
        assert str(folded) == str(graph)
    else:
        assert str(folded.nodes[-1].op.label) == expected.split("(")[0]
        assert f" = {expected}\n" in str(folded)
        assert len(folded.nodes) == 1 + expected.startswith("mul")
    if not {"large", "wider", "rounded"} & set(name.split()):  # the interpreter computes in float64
        check_same(graph, folded, s0=3)
        assert traffic(folded, {"s0": 3}).bytes <= traffic(graph, {"s0": 3}).bytes
    assert str(FoldConstants().run(folded)) == str(folded)
