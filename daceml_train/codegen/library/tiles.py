"""Tiles: reductions over windows as loop nests with their accumulators in vector registers.

    parallel over the outer axes; tiles of TU (axis u) x NV vectors (axis v) of accumulators around the reduced axes

Kernels that read overlapping windows use each element many times, so they are bound by loads from the cache and not by
memory: what a tile reads once, it uses for all its accumulators. A cost model chooses u, v, TU, and NV. Sizes are
constants of the generated text.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import replace

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.domain import Domain, Leaf
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.kernel.values import before_jumps
from daceml_train.codegen.library.launch import launch_of
from daceml_train.codegen.library.tile_schedule import TileSchedule, few
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import TABLE, Cast, Elementwise, Full
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.read import Read
from daceml_train.ops.reduction import Reduce
from daceml_train.processor import vector_bytes, vector_registers
from daceml_train.tensor import DType, Tensor

LANES = vector_bytes() // 4
LONGEST = 1024
"""Terms that are summed in float32: longer sums are left to kernels that accumulate in float64."""
SHORT = 256
"""Terms of reductions over several axes that are tiled although nothing reads windows."""
REGISTERS = vector_registers() - 4
"""Vectors that a tile keeps."""
CALLED = 10
"""Operations of elementwise operators that call functions, which cost several times what they count."""
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&"}
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_SELECTS = {
    "max": "larger({}, {})",
    "min": "smaller({}, {})",
    "where": "({} ? {} : {})",
    "abs": "absolute({})",
    "isinf": "(absolute({}) == INFINITY)",
    "isnan": "({0} != {0})",
}
_EACH = frozenset(("exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf"))


def overlapping(layout: Layout) -> bool:
    """Whether an operand is read through windows: more elements than its memory has."""
    pairs = [(n, s) for n, s in zip(layout.shape, layout.strides, strict=True) if s != 0]
    if not all(isinstance(n, int) and isinstance(s, int) for n, s in pairs):
        return False
    span = sum(abs(s) * (n - 1) for n, s in pairs) + 1
    return bool(math.prod(n for n, _ in pairs) > span)


def tiled(
    kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout], schedule: str = ""
) -> KernelCode | None:
    """The tiled code of a kernel that reduces over windows; None where general kernels are used.

    `schedule` is the text of one of `schedules`; without it, the code has the one of least cost.
    """
    nest = _nest(kernel, operands, results)
    if nest is None:
        return None
    if not nest.reductions:
        return nest.copy()
    chosen = TileSchedule.of(schedule) if schedule else next(iter(nest.ranked()), None)
    if chosen is None:
        return None
    code = nest.code(chosen)
    return replace(code, nest=(kernel, tuple(operands), tuple(results)), schedule=str(chosen))


def schedules(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> list[tuple[str, float]]:
    """The schedules that are worth a measurement, and their cost in cycles on one core: the least first."""
    nest = _nest(kernel, operands, results)
    if nest is None or not nest.reductions:
        return []
    arguments = nest.arguments()
    return [(str(s), nest.cost(arguments, s)) for s in few(nest.ranked(), nest.inner_axes())]


def _nest(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> _Nest | None:
    """The loop nest of a kernel that is tiled."""
    windows = any(isinstance(s.op, Read) for s in kernel.statements) or any(map(overlapping, operands))
    several = any(isinstance(s.op, Reduce) and len(s.op.dims) > 1 for s in kernel.statements)
    if kernel.updates or not (windows or several):
        return None
    if any(layout.dtype is not DType.float32 for layout in (*operands, *results)):
        return None
    try:
        domain = analyze(kernel, [Tensor(o.shape, o.dtype) for o in operands])
    except Refused:
        return None
    nest = _Nest(domain, operands, results)
    if not nest.fits():  # sizes that are not known among others
        return None
    if not windows and (nest.terms > SHORT or nest.whole == ()):
        return None
    return nest


class _Nest:
    """One kernel as a loop nest."""

    def __init__(self, domain: Domain, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        self.domain, self.leaves, self.sizes = domain, domain.leaves, domain.sizes
        self.operands, self.results = operands, results
        self.exact = before_jumps(self.leaves)
        self.reductions = [leaf for leaf in self.leaves.values() if leaf.reduced]
        self.reduced = self.reductions[0].reduced if self.reductions else frozenset[int]()
        self.outer = [a for a in range(len(self.sizes)) if a not in self.reduced]
        self.terms = math.prod(self.sizes[a] for a in self.reduced)
        """Terms of a reduction."""
        self.whole = tuple(p for p, r in enumerate(domain.results) if r.axes == domain.axes)
        """The results that have all axes: a pass of their own stores them after the reductions."""

    def fits(self) -> bool:
        """Whether the nest has one set of reduced axes, known sizes, and operators that vectors have."""
        numbers = [*self.sizes, *(s for layout in (*self.operands, *self.results) for s in layout.strides)]
        if not all(isinstance(n, int) for n in numbers) or 0 in self.sizes:
            return False
        if any(leaf.reduced != self.reduced for leaf in self.reductions):
            return False
        known = (frozenset(self.outer), self.domain.axes)
        if any(r.target is not None or r.axes not in known for r in self.domain.results):
            return False
        sums = any(isinstance(leaf.op, Reduce) and leaf.op.kind == "sum" for leaf in self.reductions)
        if sums and self.terms > LONGEST:
            return False
        return all(map(self.supported, self.leaves.values()))

    def supported(self, leaf: Leaf) -> bool:
        match leaf.op:
            case None:
                return leaf.dtype is DType.float32
            case Full(value=value):
                return isinstance(value, int | float) and math.isfinite(value)
            case Reduce(kind=kind):
                return kind in ("sum", "max", "min") and leaf.dtype is DType.float32
            case Cast():
                return leaf.dtype is DType.float32
            case Elementwise(kind=kind):
                return leaf.dtype in (DType.float32, DType.bool) and _expressible(kind)
        return False

    # ---- addresses --------------------------------------------------------------------------------------------------
    def strides(self, leaf: Leaf) -> tuple[dict[int, int], int]:
        """Strides by axis and the offset of an argument."""
        own = self.operands[leaf.argument].strides
        found: dict[int, int] = {}
        for axis, dim, multiple in leaf.terms:
            found[axis] = found.get(axis, 0) + own[dim] * multiple
        return found, sum(own[d] * m for d, m in leaf.offset)

    def stored(self, position: int) -> dict[int, int]:
        """Strides by axis of a result."""
        found: dict[int, int] = {}
        for dim, stride in zip(self.domain.results[position].dims, self.results[position].strides, strict=True):
            for axis in reversed(dim):
                found[axis] = stride
                stride = stride * self.sizes[axis]
        return found

    # ---- the choice -------------------------------------------------------------------------------------------------
    def arguments(self) -> list[dict[int, int]]:
        """Strides by axis of each read."""
        return [self.strides(leaf)[0] for leaf in self.leaves.values() if leaf.op is None]

    def inner_axes(self) -> list[int]:
        """The reduced axes that may be the innermost loop, the default first."""
        return sorted(self.reduced, key=self.weight)

    def weight(self, axis: int) -> int:
        """The largest stride of a read along an axis."""
        return max((abs(s.get(axis, 0)) for s in self.arguments()), default=0)

    def ranked(self) -> list[TileSchedule]:
        """The schedules, that of least cost first; none where no axis is contiguous in every read."""
        arguments = self.arguments()
        found: list[tuple[float, TileSchedule]] = []
        for v in self.outer:
            if self.sizes[v] < 4 or any(s.get(v, 0) not in (0, 1) for s in arguments):
                continue
            for u in (-1, *(a for a in self.outer if a != v)):
                for tu in (1,) if u < 0 else (2, 3, 4, 6, 8):
                    for nv in (1, 2, 4):
                        fits = tu * nv * len(self.reductions) + tu + nv + 2 <= REGISTERS
                        whole = (u < 0 or tu <= self.sizes[u]) and (nv == 1 or LANES * nv <= self.sizes[v])
                        if fits and whole:
                            schedule = TileSchedule(v, nv, u, tu)
                            found.append((self.cost(arguments, schedule), schedule))
        return [schedule for _, schedule in sorted(found, key=lambda each: each[0])]

    def cost(self, arguments: Sequence[dict[int, int]], s: TileSchedule) -> float:
        """Cycles: the larger of arithmetic, loads, and latency within a tile; then stores."""
        full, rest = divmod(self.sizes[s.v], LANES * s.nv)
        tiles = full + rest // LANES + bin(rest % LANES).count("1")
        groups = -(-self.sizes[s.u] // s.tu) if s.u >= 0 else 1
        outer = math.prod(self.sizes[a] for a in self.outer if a not in (s.u, s.v)) * tiles * groups
        work, loads, scattered = float(s.tu * s.nv * len(self.reductions)), 0, 0
        for leaf in self.leaves.values():
            if isinstance(leaf.op, Elementwise) and leaf.axes & self.reduced:
                points = (s.tu if s.u in leaf.axes else 1) * (s.nv if s.v in leaf.axes else 1)
                work += points * leaf.op.row.flops * (4 if leaf.op.row.flops >= CALLED else 1)
        for strides in arguments:
            wide = s.nv if strides.get(s.v) else 1
            loads += (s.tu if strides.get(s.u) else 1) * wide
        for position in range(len(self.results)):
            scattered += 0 if self.stored(position).get(s.v) == 1 else 1
        cycles = max(work / 2, loads / 2, 4.0 * len(self.reductions))
        return outer * (self.terms * cycles + s.tu * s.nv * (len(self.results) + 16 * scattered))

    # ---- without a reduction ----------------------------------------------------------------------------------------
    def copy(self) -> KernelCode | None:
        """The elements of windows, as matmuls read them: loops of known sizes in the order of the result."""
        if len(self.results) != 1 or any(isinstance(leaf.op, Elementwise) for leaf in self.leaves.values()):
            return None
        strides = self.stored(0)
        order = sorted(range(len(self.sizes)), key=lambda a: -strides.get(a, 0))
        if not order or strides.get(order[-1]) != 1:
            return None
        tile = _Tile(self, TileSchedule(-1, 1, -1, 1), 1, 1, 1)
        tile.store([0])
        lines = ["namespace tiles {", *self.head()]
        split = min(2, len(order) - 1)
        if split:
            lines.append(_parallel(split))
        for a in order:
            lines += ["#pragma GCC ivdep"] if a is order[-1] else []
            lines.append(f"for (int64_t a{a} = 0; a{a} < {self.sizes[a]}; ++a{a})")
        lines += ["{", *tile.lines, "}", "}", "}  // namespace tiles"]
        rows = math.prod(self.sizes[a] for a in order[:split])
        return launch_of("tiles.h", "tiles::run", (), rows, math.prod(self.sizes), text="\n".join(lines))

    def head(self) -> list[str]:
        lines = ["static void run(void** pointers, const int64_t* integers) {", "int64_t blocks = integers[0];"]
        for k in range(len(self.operands)):
            lines.append(f"const float* __restrict__ x{k} = (const float*)pointers[{k}];")
        for k in range(len(self.results)):
            lines.append(f"float* __restrict__ y{k} = (float*)pointers[{k + len(self.operands)}];")
        return lines

    # ---- the text ---------------------------------------------------------------------------------------------------
    def code(self, s: TileSchedule) -> KernelCode:
        """The C++ of the nest."""
        outer = sorted((a for a in self.outer if a not in (s.u, s.v)), key=lambda a: -abs(self.stored(0).get(a, 0)))
        lines = ["namespace tiles {", *self.head()]
        if outer:
            lines.append(_parallel(len(outer)))
        lines += [f"for (int64_t a{a} = 0; a{a} < {self.sizes[a]}; ++a{a})" for a in outer]
        lines.append("{")
        if s.u < 0:
            lines.append(self.along_v(s, 1))
        else:
            whole = self.sizes[s.u] // s.tu * s.tu
            for low, high, step in ((0, whole, s.tu), (whole, self.sizes[s.u], self.sizes[s.u] - whole)):
                if high > low:
                    lines.append(f"for (int64_t a{s.u} = {low}; a{s.u} < {high}; a{s.u} += {step}) {{")
                    lines += [self.along_v(s, step), "}"]
        lines += ["}", "}", "}  // namespace tiles"]
        rows = math.prod(self.sizes[a] for a in outer)
        work = math.prod(self.sizes) * max(1, sum(isinstance(v.op, Elementwise | Reduce) for v in self.leaves.values()))
        return launch_of("tiles.h", "tiles::run", (), rows, work, text="\n".join(lines))

    def along_v(self, s: TileSchedule, tu: int) -> str:
        parts, start = [], 0
        for width, count in ((LANES, s.nv), *((width, 1) for width in (16, 8, 4, 2, 1) if width <= LANES)):
            step = width * count
            n = (self.sizes[s.v] - start) // step
            if n:
                end = start + n * step
                parts.append(f"for (int64_t a{s.v} = {start}; a{s.v} < {end}; a{s.v} += {step}) {{")
                parts += [_Tile(self, s, tu, width, count).text(), "}"]
                start = end
        return "\n".join(parts)


class _Tile:
    """The text of one tile: `tu` x `count` vectors of `width` lanes."""

    def __init__(self, nest: _Nest, s: TileSchedule, tu: int, width: int, count: int) -> None:
        self.nest, self.s, self.width = nest, s, width
        self.points = [(du, j) for du in range(tu) for j in range(count)]
        self.lines: list[str] = []
        self.memo: dict[tuple[str, int, int], str] = {}
        self.kept: dict[tuple[str, int, int], str] = {}
        self.count = 0

    def text(self) -> str:
        pending = list(self.nest.reductions)
        while pending:
            ready = [r for r in pending if not any(self.depends(r.inputs[0], other.name) for other in pending)]
            pending = [r for r in pending if r not in ready]
            self.reduce(ready)
        self.memo = dict(self.kept)
        self.store([p for p in range(len(self.nest.results)) if p not in self.nest.whole])
        if self.nest.whole:
            self.memo = dict(self.kept)
            self.loops()
            self.store(self.nest.whole)
            self.lines.append("}")
        return "\n".join(self.lines)

    def store(self, positions: Sequence[int]) -> None:
        for position in positions:
            strides, leaf = self.nest.stored(position), self.nest.domain.results[position].leaf
            for du, j in self.points:
                place, value = self.address(strides, 0, du, j), self.value(leaf, du, j)
                self.lines.append(f"st{self.width}(y{position} + {place}, {strides.get(self.s.v, 0)}, {value});")

    def loops(self) -> None:
        """Open the loops over the reduced axes."""
        inner = self.s.inner
        for a in sorted(self.nest.reduced, key=lambda a: (a != inner, self.nest.weight(a)), reverse=True):
            self.lines.append(f"for (int64_t a{a} = 0; a{a} < {self.nest.sizes[a]}; ++a{a})")
        self.lines.append("{")

    def depends(self, name: str, on: str) -> bool:
        return name == on or any(self.depends(i, on) for i in self.nest.leaves[name].inputs)

    def reduce(self, ready: Sequence[Leaf]) -> None:
        """One pass over the reduced axes."""
        w = self.width
        for leaf in ready:
            assert isinstance(leaf.op, Reduce)
            start = {"sum": "0.0f", "max": "-INFINITY", "min": "INFINITY"}[leaf.op.kind]
            for du, j in self.points:
                self.kept[leaf.name, du, j] = name = f"c_{leaf.name}_{du}_{j}"
                self.lines.append(f"v{w} {name} = bc{w}({start});")
        self.loops()
        own = {(leaf.name, du, j) for leaf in ready for du, j in self.points}
        self.memo = {k: v for k, v in self.kept.items() if k not in own}
        for leaf in ready:
            assert isinstance(leaf.op, Reduce)
            for du, j in self.points:
                name, value = self.kept[leaf.name, du, j], self.value(leaf.inputs[0], du, j)
                update = {"sum": "{0} += {1};", "max": "{0} = larger({0}, {1});", "min": "{0} = smaller({0}, {1});"}
                self.lines.append(update[leaf.op.kind].format(name, value))
        self.lines.append("}")

    def address(self, strides: dict[int, int], offset: int, du: int, j: int) -> str:
        s = self.s
        start = offset + strides.get(s.u, 0) * du + strides.get(s.v, 0) * j * self.width
        return " + ".join([str(start), *(f"a{a} * {c}" for a, c in strides.items() if c)])

    def value(self, name: str, du: int, j: int) -> str:
        """The variable of a leaf at one point of the tile; what does not vary along u or v is computed once."""
        leaf = self.nest.leaves[name]
        key = (name, du if self.s.u in leaf.axes else 0, j if self.s.v in leaf.axes else 0)
        key = (name, du, j) if (name, du, j) in self.memo else key
        if key not in self.memo:
            text = self.computed(leaf, du, j)
            self.memo[key] = f"t{self.count}"
            self.count += 1
            self.lines.append(f"const auto {self.memo[key]} = {text};")
        return self.memo[key]

    def computed(self, leaf: Leaf, du: int, j: int) -> str:
        w = self.width
        if leaf.op is None:
            strides, offset = self.nest.strides(leaf)
            place = f"x{leaf.argument} + {self.address(strides, offset, du, j)}"
            return f"ld{w}({place})" if strides.get(self.s.v) else f"bc{w}(*({place}))"
        if isinstance(leaf.op, Full):
            return f"bc{w}({float(leaf.op.value)!r}f)"
        if isinstance(leaf.op, Cast):  # of float32 to float32: a copy
            return self.value(leaf.inputs[0], du, j)
        assert isinstance(leaf.op, Elementwise)
        scope = dict(zip("abc", (self.value(i, du, j) for i in leaf.inputs), strict=False))
        if leaf.op.kind == "div" and leaf.name in self.nest.exact:
            return f"divide({scope['a']}, {scope['b']})"
        return _cpp(ast.parse(leaf.op.row.expression, mode="eval").body, scope, w)


def _parallel(loops: int) -> str:
    """The pragma in front of so many nested loops over independent elements."""
    clauses = "num_threads(vm_team(blocks)) if (vm_team(blocks) > 1)"
    return f"#pragma omp parallel for collapse({loops}) {clauses} schedule(static)"


def _expressible(kind: str) -> bool:
    """Whether an elementwise operator has a form on vectors."""
    try:
        _cpp(ast.parse(TABLE[kind].expression, mode="eval").body, dict.fromkeys("abc", "x"), 1)
    except Refused:
        return False
    return True


def _cpp(tree: ast.expr, scope: dict[str, str], width: int) -> str:
    match tree:
        case ast.Name(id=name):
            return scope[name]
        case ast.Constant(value=value) if isinstance(value, int | float) and math.isfinite(value):
            return f"bc{width}({float(value)!r}f)"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{_cpp(operand, scope, width)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({_cpp(left, scope, width)} {_OPERATORS[type(op)]} {_cpp(right, scope, width)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return f"({_cpp(left, scope, width)} {_COMPARISONS[type(op)]} {_cpp(right, scope, width)})"
        case ast.Call(func=ast.Name(id=name), args=args) if name in _SELECTS:
            return _SELECTS[name].format(*(_cpp(a, scope, width) for a in args))
        case ast.Call(func=ast.Name(id=name), args=[a]) if name in _EACH:
            return f"each({_cpp(a, scope, width)}, [](float x) {{ return vm::{name}(x); }})"
    raise Refused(f"{ast.unparse(tree)} has no form on vectors")
