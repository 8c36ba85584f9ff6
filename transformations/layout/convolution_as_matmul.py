"""ConvolutionAsMatmul: im2col and one matmul replace a convolution where that moves fewer bytes than the library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from daceml_train.codegen.library.im2col import LARGEST
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import MatmulAdd
from daceml_train.ops.convolution import Convolution, ConvolutionInputGrad, ConvolutionWeightGrad, Geometry
from daceml_train.ops.movement import Reorder
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.ops.resample import Col2Im, Im2Col
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, DType, Tensor, channels_last, hint, product, same, same_memory, simplify

LAST, ROWS = channels_last(4), (0, 1, 2, 3)


@dataclass(frozen=True)
class ConvolutionAsMatmul(Rewrite):
    """Compute a convolution or its gradient by im2col and one matmul with the weight in its own layout.

        x, w[K, C, kernel] -> [conv] -> y     =>     x -> [im2col] -> c;  c, w as [K, C kernel] -> [matmul] -> y
        g, w -> [conv input grad] -> gx       =>     g, w as [K, C kernel] -> [matmul] -> c -> [col2im] -> gx
        g, x -> [conv weight grad] -> gw      =>     x -> [im2col] -> c;  g, c -> [matmul] -> gw

    The library reorders the weight into blocks in every call. A 1x1 filter needs no im2col: channels-last images are
    already a matrix. Bytes: the library's reorders are saved; the windows are written and read (and images are
    reordered where they are not channels-last). The pass must save at least `share` of the bytes that the convolution
    moves: where weights are small, the library's own loops are as good. The exception is its weight gradients of
    sequences that skip pixels or whose rows exceed the second-level cache (`row` bytes): they run at a third to half
    of the matmul's rate, and so become matmuls whatever that moves.
    """

    level = "layout"
    targets = ("cpu",)
    share: float = 0.1
    row: int = 2 << 20

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        conv = convolution_at(uses, node)
        if conv is None:
            return None
        return {"problem": Problem.of(conv, uses), "conv": conv, "reordered": conv is not node}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        problem: Problem = match.bindings["problem"]
        conv: Node = match.bindings["conv"]
        op, weight = problem.op, problem.weight
        dimensions = len(op.stride)
        yield dimensions == 2, f"{op.label} of {dimensions} dimensions: im2col supports images and sequences"
        yield op.groups == 1, f"{op.groups} groups would be as many matmuls"
        orders = {match.uses.graph.tensors[name].order for name in (*conv.inputs[:2], conv.outputs[0])}
        usual = not problem.sequence or orders <= {None, channels_last(3)}
        yield usual, f"sequences in orders {orders - {None}} are neither row-major nor channels-last"
        yield not op.transposed, "a transposed convolution adds up windows in its forward pass"
        yield weight.dtype is DType.float32, f"the library runs {weight.dtype.short} in loops of its own"
        whole = all(isinstance(k, int) and k > 0 for k in weight.shape[2:]) and isinstance(weight.shape[1], int)
        yield whole and product(weight.shape[2:]) <= LARGEST, f"windows of {weight} have no kernel"
        lies = isinstance(op, ConvolutionWeightGrad) or same_memory(weight.shape, weight.order, None)
        yield lies, f"the weight %{conv.inputs[-1]} is not row-major, as the matmul requires"
        saved, moved = -hint(self.traffic(match)), hint(problem.moved)
        enough = saved >= self.share * moved or self.slow(problem)
        yield enough, f"it would save {max(saved, 0):.0f} of the {moved:.0f} bytes moved"

    def slow(self, problem: Problem) -> bool:
        """Whether the library is slow enough that bytes do not matter."""
        if not problem.sequence or problem.point or not isinstance(problem.op, ConvolutionWeightGrad):
            return False
        images = problem.x.shape[0]
        row = hint(problem.x.bytes) / hint(images) + hint(problem.y.bytes) / hint(images)
        return problem.op.stride[1] > 1 or row > self.row

    def traffic(self, match: Match) -> Dim:
        problem: Problem = match.bindings["problem"]
        reorder = 2 * problem.weight.bytes if match.bindings["reordered"] else 0
        return simplify(problem.added - problem.reorders - reorder)

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        problem: Problem = match.bindings["problem"]
        operands = [values[name] for name in match.bindings["conv"].inputs]
        wanted = match.uses.graph.tensors[match.root.outputs[0]]
        if problem.sequence:
            operands, wanted = [_as_image(value) for value in operands], _row(wanted)
        match problem.op:
            case Convolution():
                x, w, *bias = operands
                rows, factor = problem.windows(x), problem.matrix(w).T
                (output,) = builder.emit(MatmulAdd(), bias[0], rows, factor) if bias else (rows @ factor,)
                result = in_order(problem.image(output, problem.y), wanted)
            case ConvolutionInputGrad():
                g, w = operands
                result = in_order(problem.summed(_rows(g) @ problem.matrix(w)), wanted)
            case _:
                g, x = operands
                result = problem.filter(_rows(g).T @ problem.windows(x), wanted)
        return (_as_sequence(result) if problem.sequence else result,)


def convolution_at(uses: Uses, node: Node) -> Node | None:
    """The convolution or gradient that a node is.

    Where a weight's gradient is reordered to be row-major, and for that alone, the root is the reorder: kernels of
    ours write the wanted order.
    """
    if isinstance(node.op, Reorder):
        conv = uses.producers.get(node.inputs[0], node)
        alone = isinstance(conv.op, ConvolutionWeightGrad) and uses.only_reader(node.inputs[0], node)
        return conv if alone and node.op.order == ROWS else None
    if isinstance(node.op, ConvolutionWeightGrad):
        readers = uses.readers[node.outputs[0]]
        follows = len(readers) == 1 and isinstance(readers[0].op, Reorder) and readers[0].op.order == ROWS
        if follows and node.outputs[0] not in uses.visible:
            return None
    return node if isinstance(node.op, Geometry) else None


@dataclass(frozen=True)
class Problem:
    """A convolution's images, weight and result, where present; the result's gradient counts as the result.

    A `sequence` is an image of one row here.
    """

    op: Geometry
    x: Tensor
    weight: Tensor
    y: Tensor
    reorders: Dim
    visible: bool
    """Whether the result is visible outside the graph."""
    sequence: bool = False

    @staticmethod
    def of(node: Node, uses: Uses) -> Problem:
        """The description of a node of a graph."""
        op = node.op
        assert isinstance(op, Geometry)
        operands = [uses.graph.tensors[name] for name in node.inputs]
        result = uses.graph.tensors[node.outputs[0]]
        match op:
            case Convolution():
                x, w, y = operands[0], operands[1], result
            case ConvolutionInputGrad():
                y, w, x = operands[0], operands[1], result
            case _:
                y, x, w = operands[0], operands[1], result
        visible, reorders = node.outputs[0] in uses.visible, op.reorders(*operands)
        if len(op.stride) == 1:
            return Problem(_of_images(op), _row(x), _row(w), _row(y), reorders, visible, sequence=True)
        return Problem(op, x, w, y, reorders, visible)

    @property
    def point(self) -> bool:
        """Whether windows are single pixels, each once."""
        op = self.op
        return all(same(k, 1) for k in self.weight.shape[2:]) and set(op.stride) == {1} and set(op.padding) == {0}

    @property
    def moved(self) -> Dim:
        """Bytes that the convolution moves."""
        return simplify(self.x.bytes + self.weight.bytes + self.y.bytes + self.reorders)

    @property
    def added(self) -> Dim:
        """Bytes that the matmul moves besides images and weight."""
        x, y, w = self.x, self.y, self.weight
        added: Dim = 0
        if not self.point:
            windows = simplify(product((y.shape[0], *y.shape[2:], *w.shape[1:])) * x.dtype.bytes)
            added = 2 * windows
        elif not _last(x):  # an operand to reorder, or a result
            added = 2 * x.bytes
        if not _last(y):
            added = added + 2 * y.bytes
        if isinstance(self.op, ConvolutionInputGrad) and not self.point and not _last(x):
            added = added + 2 * x.bytes
        if self.back(w) and not same_memory(w.shape, w.order, None):
            added = added + 2 * w.bytes
        return simplify(added)

    def back(self, wanted: Tensor) -> bool:
        """Whether a weight's gradient must be reordered to `wanted`, since it is visible outside the graph."""
        return isinstance(self.op, ConvolutionWeightGrad) and self.visible and wanted.order is not None

    def matrix(self, w: Value) -> Value:
        """The weight as [K, C * kernel]."""
        return w.view((w.shape[0], product(w.shape[1:])))

    def windows(self, x: Value) -> Value:
        """The windows of images as [N * windows, C * kernel]."""
        if self.point:
            return _rows(x)
        columns = x.apply(Im2Col(last=True, **self.geometry)).permute((0, 2, 1))
        return columns.view((product(columns.shape[:2]), columns.shape[2]))

    def summed(self, windows: Value) -> Value:
        """Windows as rows, added up at their positions in images."""
        if self.point:
            return self.image(windows, self.x)
        n = self.y.shape[0]
        count = product(self.y.shape[2:])
        columns = windows.view((n, count, windows.shape[1])).permute((0, 2, 1))
        height, width = self.x.shape[2:]
        return columns.apply(Col2Im(size=(height, width), last=True, **self.geometry))

    def image(self, rows: Value, like: Tensor) -> Value:
        """A matrix with a row per pixel as channels-last images of the sizes of `like`."""
        n, c, h, w = like.shape
        return rows.view((n, h, w, c)).permute((0, 3, 1, 2))

    def filter(self, matrix: Value, wanted: Tensor) -> Value:
        """[K, C * kernel] as a weight: row-major, unless another order is expected outside the graph."""
        if same_memory(self.weight.shape, None, LAST) and wanted.order is not None:
            k, c, h, w = self.weight.shape
            return matrix.view((k, h, w, c)).permute((0, 3, 1, 2))
        result = matrix.view(self.weight.shape)
        return in_order(result, wanted) if self.back(wanted) else result

    @property
    def geometry(self) -> dict[str, Any]:
        """The options of `im2col` and `col2im`."""
        op, (height, width) = self.op, self.weight.shape[2:]
        pairs = {"dilation": op.dilation, "padding": op.padding, "stride": op.stride}
        return {"kernel": (height, width)} | {name: (pair[0], pair[1]) for name, pair in pairs.items()}


def _of_images(op: Geometry) -> Geometry:
    """A convolution of sequences as one of single-row images."""
    options: dict[str, Any] = {"stride": (1, *op.stride), "padding": (0, *op.padding), "dilation": (1, *op.dilation)}
    options["output_padding"] = (0, *op.output_padding)
    for name in ("input_shape", "weight_shape"):
        if (shape := getattr(op, name, None)) is not None:
            options[name] = (*shape[:2], 1, *shape[2:])
    return replace(op, **options)


def _row(sequence: Tensor) -> Tensor:
    """The type of sequences, or of a filter, as single-row images with the same memory layout."""
    if sequence.rank != 3:
        return sequence
    order = LAST if sequence.order == channels_last(3) else None
    shape = (*sequence.shape[:2], 1, sequence.shape[2])
    return Tensor(shape, sequence.dtype, order)


def _as_image(x: Value) -> Value:
    """Sequences, or a filter, as single-row images in the same memory."""
    if len(x.shape) != 3:
        return x
    n, c, length = x.shape
    if x.tensor.order == channels_last(3):
        return x.permute((0, 2, 1)).view((n, 1, length, c)).permute((0, 3, 1, 2))
    return x.view((n, c, 1, length))


def _as_sequence(x: Value) -> Value:
    """Single-row images as sequences in the same memory."""
    n, c, _, length = x.shape
    if x.tensor.order == LAST:
        return x.permute((0, 2, 3, 1)).view((n, length, c)).permute((0, 2, 1))
    return x.view((n, c, length))


def _last(tensor: Tensor) -> bool:
    """Whether images are channels-last, or laid out as if they were."""
    return same_memory(tensor.shape, tensor.order, LAST)


def _rows(x: Value) -> Value:
    """Images [N, C, H, W] as a matrix with a row per pixel."""
    x = x if _last(x.tensor) else x.apply(Reorder(LAST))
    pixels = x.permute((0, 2, 3, 1))
    return pixels.view((product(pixels.shape[:3]), pixels.shape[3]))


def in_order(x: Value, wanted: Tensor) -> Value:
    """The value in the memory order of `wanted`."""
    if x.tensor.order == wanted.order:
        return x
    if same_memory(wanted.shape, x.tensor.order, wanted.order):
        return x if wanted.order is not None else x.apply(ViewOp(wanted.shape))
    return x.apply(Reorder(wanted.order or ROWS))
