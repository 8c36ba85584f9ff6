"""Values: the C++ text that computes each value of a kernel, and the constants that the caller passes."""

from __future__ import annotations

import struct

import sympy

from daceml_train.codegen.kernel.domain import Leaf
from daceml_train.codegen.kernel.expression import HALVES, cast, computed, elementwise, literal, rounded
from daceml_train.codegen.kernel.loops import Loops
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import JUMPS, Cast, Elementwise, Full, Iota
from daceml_train.ops.random import Uniform
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, DType, same, simplify


def before_jumps(leaves: dict[str, Leaf]) -> frozenset[str]:
    """The values of which a rounding, a comparison, or a conversion to an integer is computed, element by element."""
    found: set[str] = set()
    for leaf in reversed(leaves.values()):
        jumps = isinstance(leaf.op, Elementwise) and leaf.op.kind in JUMPS
        whole = isinstance(leaf.op, Cast) and not leaf.op.dtype.is_float
        if jumps or whole or (leaf.name in found and not isinstance(leaf.op, Reduce)):
            found.update(leaf.inputs)
    return frozenset(found)


class Values:
    """`text[name]` is the right-hand side of a value. Constants other than small round numbers become arguments."""

    def __init__(self, loops: Loops) -> None:
        self.loops, self.leaves = loops, loops.leaves
        self.constants: dict[str, Dim] = {}
        """Symbol -> the integer to pass: a number, a size, or the bits of a double."""
        self.reals: list[str] = []
        """The symbols that are bits of a double."""
        self.constant_text = {n: self.constant(leaf) for n, leaf in self.leaves.items() if isinstance(leaf.op, Full)}
        self.stored = {result.leaf for result in loops.domain.results}
        self.deciding = before_jumps(self.leaves)
        self.text = {name: self._text(leaf) for name, leaf in self.leaves.items()}

    def parameter(self, value: Dim) -> str:
        """The symbol of an integer that the caller passes."""
        for name, known in self.constants.items():
            if name not in self.reals and same(known, value):
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def constant(self, leaf: Leaf) -> str:
        """A constant: small round numbers in the text, others as arguments, so the code can be shared."""
        assert isinstance(leaf.op, Full)
        value, dtype = leaf.op.value, computed(leaf.dtype)
        if isinstance(value, sympy.Expr) and not value.is_number:
            numerator, denominator = sympy.fraction(sympy.together(value))
            whole = value.is_integer
            parts = [value] if whole else [numerator, denominator]
            if not all(part.is_integer for part in parts):
                raise Refused(f"constant {value} is not a ratio of integer sizes")
            texts = [f"({dtype.c}){self.parameter(simplify(part))}" for part in parts]
            return texts[0] if whole else f"({texts[0]} / {texts[1]})"
        if isinstance(value, sympy.Expr):
            value = int(value) if value.is_integer else float(value)
        number = float(value)
        if dtype is DType.bool or number != number or number in (float("inf"), -float("inf")):
            return literal(value, dtype)
        if abs(number) <= 16 and number * 2 == int(number * 2):
            return literal(value, dtype)
        if not dtype.is_float:
            return f"({dtype.c}){self.parameter(int(value))}"
        pattern = struct.unpack("<q", struct.pack("<d", number))[0]
        for name in self.reals:
            if self.constants[name] == pattern:
                return f"({dtype.c}){name}"
        name = f"c{len(self.constants)}"
        self.constants[name] = pattern
        self.reals.append(name)
        return f"({dtype.c}){name}"

    def operand(self, name: str) -> str:
        """The name of a value in other code; a constant is written out."""
        leaf = self.leaves[name]
        return self.constant_text[name] if isinstance(leaf.op, Full) else name

    def _text(self, leaf: Leaf) -> str:
        """The right-hand side that computes a value."""
        op = leaf.op
        if op is None or isinstance(op, Full | Reduce):
            return ""
        texts = [self.operand(i) for i in leaf.inputs]
        kinds = [self.leaves[i].dtype for i in leaf.inputs]
        match op:
            case Elementwise():
                texts = [self._seen(op, i, text) for i, text in zip(leaf.inputs, texts, strict=True)]
                lane = self._lane_test(leaf)
                if lane is not None:
                    return lane
                if (quotient := self._quotient(leaf, texts)) is not None:
                    return quotient
                values = [o.value if isinstance(o := self.leaves[i].op, Full) else None for i in leaf.inputs]
                return elementwise(op, texts, kinds, [v if isinstance(v, int | float) else None for v in values])
            case Cast():
                producer = self.leaves[leaf.inputs[0]].op
                return cast(op, texts[0], kinds[0], exact=producer is None or isinstance(producer, Cast))
            case Iota():
                dtype = computed(leaf.dtype)
                index = self.index_text(leaf)
                if op.start == 0 and op.step == 1:
                    return f"({dtype.c}){index}"
                start, step = literal(op.start, dtype), literal(op.step, dtype)
                return f"({dtype.c})({start} + {step} * ({dtype.c}){index})"
            case Uniform():
                stream = self.parameter(op.stream) if op.stream else "0"
                return f"vm::uniform_{leaf.dtype.c}(vm::random_key({texts[0]}, {stream}), {self.index_text(leaf)})"
        raise Refused(f"{op.label} has no C++ form")

    def _seen(self, op: Elementwise, name: str, text: str) -> str:
        """An operand as eager execution sees it where its last digit decides: a computed 16-bit float is rounded."""
        leaf = self.leaves[name]
        exact = leaf.op is None or isinstance(leaf.op, Cast | Full | Iota) or leaf.dtype not in HALVES
        return text if exact or op.kind not in JUMPS else rounded(text, leaf.dtype)

    def _quotient(self, leaf: Leaf, texts: list[str]) -> str | None:
        """A division by a constant as a multiplication: a vector division costs as much as about thirty.

        Reciprocal and product are both rounded: 41 times a 41st is less than 1. So a quotient that is stored, or whose
        last digit may decide a result, is exact; the compiler, too, may multiply by the reciprocal. None if that could
        leave the type's range, and for other quotients in double, which serves as the reference of comparisons.
        """
        assert isinstance(leaf.op, Elementwise)
        if leaf.op.kind != "div" or not leaf.dtype.is_float:
            return None
        exact = f"vm::divide<{computed(leaf.dtype).c}>({texts[0]}, {texts[1]})"
        if leaf.name in self.deciding:
            return exact
        divisor = self.leaves[leaf.inputs[-1]].op
        if not isinstance(divisor, Full):
            return None
        value = divisor.value
        known = not isinstance(value, sympy.Expr) or value.is_number
        if known and not 1e-30 < abs(float(value)) < 1e30:
            return None
        if leaf.name in self.stored:
            return exact
        return f"({texts[0]} * (1.0f / {texts[1]}))" if computed(leaf.dtype) is DType.float32 else None

    def _lane_test(self, leaf: Leaf) -> str | None:
        """`iota == value` with one value for all lanes, in 32 bits: 64-bit comparisons halve the speed of a loop."""
        assert isinstance(leaf.op, Elementwise)
        if leaf.op.kind not in ("eq", "ne") or not self.loops.lane_axes:
            return None
        for lane, value in (leaf.inputs, leaf.inputs[::-1]):
            op, last = self.leaves[lane].op, self.loops.lane_axes[-1].name
            plain = isinstance(op, Iota) and op.start == 0 and op.step == 1 and op.dtype is DType.int64
            if plain and self.index_text(self.leaves[lane]) == f"({last})" and not self.loops.has_lanes(value):
                test = f"vm::is_lane({last}, {self.operand(value)})"
                return test if leaf.op.kind == "eq" else f"(!{test})"
        return None

    def index_text(self, leaf: Leaf) -> str:
        """The linear index of `iota` and `uniform` in terms of the loops."""
        axis_of, innermost = self.loops.axis_of, self.loops.innermost
        coefficient = {axis_of[a]: c for a, c in leaf.index if innermost[axis_of[a]] == a}
        terms = []
        for name, c in coefficient.items():
            terms.append(name if same(c, 1) else f"{name} * {self.parameter(c)}")
        return f"({' + '.join(terms)})" if terms else "0"
