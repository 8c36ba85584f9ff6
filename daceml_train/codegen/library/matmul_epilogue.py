"""Matmul epilogues: kernels around a matmul or a convolution with a packed matrix. The elementwise operators on its
result are generated into the hand-written loops (`native/matmul.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.codegen.cpu.launch import KernelCode, groups
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.domain import Domain, Leaf
from daceml_train.codegen.kernel.expression import computed
from daceml_train.codegen.kernel.loops import Layout, Loops
from daceml_train.codegen.kernel.values import Values
from daceml_train.codegen.library.launch import launch_of
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Cast, Elementwise, Full
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.packed import PANEL, Images, Packed, PackedConvolution, PackedDepthwise, has_product
from daceml_train.tensor import Dim, DType, Tensor, product, same, simplify, symbol

ROWS, USUAL, BLOCK, CACHED = 14, 12, 64, 1 << 20
"""The largest and the usual number of rows of a tile, the number of tiles with stored addresses, bytes of copied rows.

They are those of `native/matmul.h`.
"""
GROUP = 128
"""Channels that a thread takes at a time, as in `native/channels.h`."""
TRANSFORMED, TILES = 5 << 18, 96
"""Bytes of transformed images, and their largest number of tiles, as in `native/winograd.h`."""
WIDEST = 16
"""The largest number of lanes of a vector: shorter rows are copied."""


def matmul_kernel(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of a kernel with a packed matmul; None if it has none. Raises `Refused` with a reason."""
    if not has_product(kernel):
        return None
    around = MatmulEpilogue.of(kernel, operands, results)
    op, (x, panels), y = around.op, around.factors, around.made
    rows = product((y.shape[0], *y.shape[2:]))
    held, units = _scratch(op, x, panels), simplify(groups(rows, USUAL) * groups(op.columns, PANEL))
    header, run = "matmul.h", "run"
    options = [around.places[0], around.places[1], len(operands)]
    if isinstance(op, PackedDepthwise):
        header, run, units = (
            "channels.h",
            "run_by_channels",
            simplify(y.shape[0] * y.shape[2] * groups(op.columns, GROUP)),
        )
        options += [op.kernel[1], op.stride[1]]
    elif tiled(op):
        header, run = "winograd.h", "run_in_tiles"
    call = f"product::{run}<Body, {', '.join(map(str, options))}>"
    numbers = (*_shape(op, x, y), held, *around.values.constants.values())
    work = simplify(
        op.flops(*(Tensor(o.shape, o.dtype) for o in (x, panels))) + product(y.shape) * len(kernel.statements)
    )
    scratch = () if same(held, 0) else (held * symbol("blocks"),)
    return launch_of(header, call, numbers, units, work, scratch, around.text())


@dataclass(frozen=True)
class MatmulEpilogue:
    """A packed matmul and the elementwise operators on its result."""

    op: Packed
    factors: tuple[Layout, Layout]
    made: Layout
    """The matmul's result as it would be stored."""
    domain: Domain
    values: Values
    places: tuple[int, int]
    """The kernel's operands that are the matmul's operands."""
    others: tuple[tuple[Leaf, int, str], ...]
    """Other values that are read: the kernel's operand, and the text of its index."""

    @staticmethod
    def of(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> MatmulEpilogue:
        """The epilogue of a kernel. Raises `Refused` if it is another kind of kernel."""
        first = next(s for s in kernel.statements if isinstance(s.op, Packed))
        rest = [s for s in kernel.statements if s is not first]
        op, layouts = first.op, dict(zip(kernel.arguments, operands, strict=True))
        assert isinstance(op, Packed)
        if not all(name in layouts for name in first.inputs):
            raise Refused(f"{first} multiplies what its kernel computes")
        if any(layouts[name].dtype is not DType.float32 for name in first.inputs):
            raise Refused(f"{first} is not of f32")
        if len(results) != 1 or kernel.updates or results[0].dtype is not DType.float32:
            raise Refused("the kernel around a packed matmul has one float32 result, in memory of its own")
        x, panels = (layouts[name] for name in first.inputs)
        (tensor,) = op.infer(*(Tensor(o.shape, o.dtype) for o in (x, panels)))
        result = Layout(tensor.shape, tensor.strides, tensor.dtype)
        dense = Tensor(panels.shape).strides
        if not all(same(a, b) or same(n, 1) for n, a, b in zip(panels.shape, panels.strides, dense, strict=True)):
            raise Refused("the matrix is not packed in panels")
        if tiled(op) and not (isinstance(x.shape[1], int) and x.shape[1] % WIDEST == 0 and same(x.strides[1], 1)):
            raise Refused(f"tiles of {x.shape[1]} channels are not whole vectors, or not adjacent")
        if isinstance(op, PackedDepthwise) and not same(x.strides[1], 1):
            raise Refused("channels are not adjacent in memory")
        names = [name for name in kernel.arguments if name not in first.inputs]
        if any(name in s.inputs for s in rest for name in first.inputs):
            raise Refused("an operand of the matmul has a second use")
        body = Kernel((first.outputs[0], *names), tuple(rest), kernel.yields)
        read = [result, *(layouts[name] for name in names)]
        domain = analyze(body, [Tensor(o.shape, o.dtype) for o in read])
        if not all(isinstance(leaf.op, Elementwise | Cast | Full | None) for leaf in domain.leaves.values()):
            raise Refused("only elementwise operators may follow a matmul in its kernel")
        loops = Loops(domain, read, results)
        left, right, *places = map(kernel.arguments.index, (*first.inputs, *names))
        others = tuple((leaf, places[leaf.argument - 1], index) for leaf, index in _indexed(loops, op.columns))
        return MatmulEpilogue(op, (x, panels), result, domain, Values(loops), (left, right), others)

    def text(self) -> str:
        """The C++ text of `Body`: the epilogue of a sum, given its position in the result and its column."""
        fields, loads, lines, ahead = [], [], [], []
        for leaf, place, index in self.others:
            fields.append(f"    const {leaf.dtype.c}* from_{leaf.name};")
            loads.append(f"        from_{leaf.name} = (const {leaf.dtype.c}*)pointers[{place}];")
            lines.append(f"        const {leaf.dtype.c} {leaf.name} = from_{leaf.name}[{index}];")
            if index == "at":
                lanes = 64 // leaf.dtype.bytes
                ahead += [f"        __builtin_prefetch(from_{leaf.name} + at + {c});" for c in range(0, PANEL, lanes)]
        for position, name in enumerate(self.values.constants):
            real = name in self.values.reals
            fields.append(f"    {'double' if real else 'int64_t'} {name};")
            loads.append(f"        memcpy(&{name}, integers + {position}, 8);")
        sums = [leaf.name for leaf in self.domain.leaves.values() if leaf.op is None and leaf.argument == 0]
        lines += [f"        const float {name} = sum;" for name in sums]
        for name, leaf in self.domain.leaves.items():
            if leaf.op is not None and not isinstance(leaf.op, Full):
                lines.append(f"        const {computed(leaf.dtype).c} {name} = {self.values.text[name]};")
        result = self.values.operand(self.domain.results[0].leaf)
        head = "inline __attribute__((always_inline)) float operator()(float sum, int64_t at, int64_t column) const {"
        built = ["    Body(void** pointers, const int64_t* integers) {", *loads, "    }"]
        asked = ["    void ahead(int64_t at) const {", *ahead, "    }"]
        results = [f"    {head}", *lines, f"        return {result};", "    }"]
        return "\n".join(["struct Body {", *fields, *built, *asked, *results, "};"])


def _indexed(loops: Loops, columns: int) -> list[tuple[Leaf, str]]:
    """Other values that a body reads besides the matmul's result, with the text of their index. Raises `Refused`."""
    (stored,) = loops.stores
    found = []
    for leaf, strides in zip(loops.reads, loops.memory, strict=True):
        if leaf.offset or leaf.dtype in (DType.bfloat16, DType.float16):
            raise Refused("the epilogue of a matmul reads a slice, or an array of 16-bit numbers")
        steps = {a: s for a, s in strides.items() if not same(s, 0) and not same(loops.domain.sizes[a], 1)}
        whole = {a: s for a, s in stored.items() if not same(loops.domain.sizes[a], 1)}
        inner = {a: s for a, s in whole.items() if isinstance(s, int) and s < columns}
        if steps.keys() == whole.keys() and all(same(whole[a], s) for a, s in steps.items()):
            index = "at"
        elif leaf.argument and steps.keys() == inner.keys() and all(same(inner[a], s) for a, s in steps.items()):
            index = "column"
        elif leaf.argument and not steps:
            index = "0"
        else:
            raise Refused("the epilogue of a matmul reads an array in another order than its result")
        if leaf.argument:
            found.append((leaf, index))
    return found


def tiled(op: Packed) -> bool:
    """Whether a convolution is computed in tiles; see `native/winograd.h`."""
    return isinstance(op, PackedConvolution) and op.tiled


def _scratch(op: Packed, x: Layout, panels: Layout) -> Dim:
    """Bytes of a block, in whole cache lines: offsets, addresses, zeros, and copies of rows or transformed tiles."""
    channels = x.shape[1]
    if isinstance(op, PackedDepthwise):
        return 0
    if tiled(op):
        assert isinstance(channels, int)
        pitch = channels + WIDEST
        tiles = min(max(TRANSFORMED // (64 * pitch) // USUAL * USUAL, USUAL), TILES)
        return 4 * (pitch + 16 * tiles * (pitch + PANEL))
    depth = panels.shape[1]
    held = 8 * depth + 8 * ROWS * BLOCK * product(_kernel(op)) + 4 * channels
    if not (isinstance(channels, int) and channels >= WIDEST and same(x.strides[1], 1)):
        held = held + 4 * ROWS * (depth + 2 * PANEL) + CACHED
    return 64 * groups(held, 64)


def _kernel(op: Packed) -> tuple[int, int]:
    return op.kernel if isinstance(op, Images) else (1, 1)


def _shape(op: Packed, x: Layout, y: Layout) -> tuple[Dim, ...]:
    """The numbers of `Shape` in `native/matmul.h`: a row of a matrix is a column of pixels."""
    if isinstance(op, Images):
        dilation = op.plain.dilation
        sizes = (x.shape[0], x.shape[1], x.shape[2], x.shape[3], y.shape[2], y.shape[3], op.columns)
        return (*sizes, *op.kernel, *x.strides, *op.stride, *op.padding, *dilation)
    sizes = (1, x.shape[1], 1, x.shape[0], 1, x.shape[0], op.columns)
    return (*sizes, 1, 1, 0, x.strides[1], 0, x.strides[0], 1, 1, 0, 0, 1, 1)
