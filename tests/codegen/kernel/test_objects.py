"""DaCe's objects are the same without the checks of their properties, and the texts of kernels, too."""

import contextlib

import dace
import pytest
from dace.sdfg.state import LoopRegion

from daceml_train.codegen.kernel import frame
from daceml_train.codegen.kernel.objects import unchecked
from tests.codegen.cuda.running import code_of
from tests.codegen.test_families import families

KINDS = {
    "sdfg": lambda: dace.SDFG("a"),
    "state": lambda: dace.SDFGState("s"),
    "loop": lambda: LoopRegion("l", "i < 3", "i", "i = 0", "i = i + 1"),
    "edge": lambda: dace.InterstateEdge(assignments={"a": "b"}),
    "array": lambda: dace.data.Array(dace.float32, [dace.symbol("n"), 3]),
    "scalar": lambda: dace.data.Scalar(dace.int64, transient=True),
    "memlet": lambda: dace.Memlet("a[0, 1:n]", wcr="lambda x, y: x + y"),
    "range": lambda: dace.subsets.Range([(0, 3, 1)]),
    "access": lambda: dace.nodes.AccessNode("a"),
    "tasklet": lambda: dace.nodes.Tasklet("t", {"x"}, {"y"}, "y = x;", dace.Language.CPP),
    "map": lambda: dace.nodes.Map("m", ["i"], dace.subsets.Range([(0, 3, 1)])),
    "nested": lambda: dace.nodes.NestedSDFG("n", dace.SDFG("b"), {"x"}, {"y"}, {"n": "m"}),
}


def attributes(value: object) -> dict[str, str]:
    """Names, types and texts, without addresses."""
    shown = {name: f"{type(v)} {v}" for name, v in vars(value).items() if name not in ("_guid", "_debuginfo")}
    return {name: text.split(" at 0x")[0] for name, text in shown.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_have_the_same_attributes(kind: str) -> None:
    with unchecked():
        quick = KINDS[kind]()
    assert attributes(quick) == attributes(KINDS[kind]())


def test_containers_belong_to_one_object() -> None:
    with unchecked():
        one, other = (dace.nodes.AccessNode("a") for _ in range(2))
        one.add_in_connector("x")
    assert "x" in one.in_connectors and "x" not in other.in_connectors


def test_outside_of_the_context_properties_are_checked() -> None:
    with unchecked():
        assert dace.nodes.AccessNode("a").data == "a"
    node = dace.nodes.AccessNode("a")
    with pytest.raises(dace.properties.PropertyError, match="already assigned"):
        node.__init__("a")


def test_texts_of_kernels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = families(23, 50, 1)[::3]
    codes = [code for case in cases for code in (case.code, code_of(case))]
    quick = [code.source for code in codes]
    monkeypatch.setattr(frame, "unchecked", contextlib.nullcontext)
    for code, text in zip(codes, quick, strict=True):
        vars(code).pop("source")
        assert code.source == text
