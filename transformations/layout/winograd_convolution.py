"""WinogradConvolution: 3x3 convolutions of a training step, and their gradients, with 16 multiplications instead of 36."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.traffic import traffic
from daceml_train.codegen.library.matmul_epilogue import WIDEST
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.convolution import Convolution, ConvolutionInputGrad, Geometry
from daceml_train.ops.movement import Reorder
from daceml_train.ops.operator import Value
from daceml_train.ops.packed import PANEL, PackedConvolution
from daceml_train.ops.winograd import WinogradFilter
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, DType, Tensor, channels_last, hint, product, same_memory, same_shape, simplify
from daceml_train.transformations.layout.pack_weights import biased, number, side_by_side


@dataclass(frozen=True)
class WinogradConvolution(Rewrite):
    """Compute 3x3 convolutions with stride 1, and their gradients for images, in tiles of 2x2 results: F(2x2, 3x3).

        x, w -> [conv] -> y               =>     w -> [winograd filter] -> p;  x, p -> [packed convolution] -> y
        g, w -> [conv input grad] -> gx   =>     w -> [winograd filter] -> p;  g, p -> [packed convolution] -> gx

    Tiles take 16 multiplications where windows take 36 (https://arxiv.org/abs/1509.09308). Filters are transformed in
    each step, which costs as much as some sixty tiles, so there must be at least `tiles`, and a third fewer
    multiplications in all: small images fill their tiles badly. The pass handles float32 images that are channels-last,
    with channels that fill vectors. Results differ by slightly more rounding, and an infinity or NaN spreads to its
    tiles. Bytes: the library's reorders of the weight are saved; the transformed filter is written and read.
    """

    level = "layout"
    targets = ("cpu",)
    tiles: int = 100

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Convolution | ConvolutionInputGrad) or len(node.op.stride) != 2:
            return None
        image, weight, *added = node.inputs
        return {"image": image, "weight": weight, "added": added}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, op, (y,) = match.uses, match.root.op, match.root.outputs
        assert isinstance(op, Geometry)
        image, weight, result = (uses.graph.tensors[name] for name in (*match.root.inputs[:2], y))
        usual = {*op.stride, *op.dilation, op.groups} == {1} and set(op.output_padding) == {0} and not op.transposed
        yield usual and same_shape(weight.shape[2:], (3, 3)), "tiles are for windows of 3x3, each once"
        yield image.dtype is DType.float32, f"tiles are of f32, not of {image.dtype.short}"
        yield max(op.padding) <= 2, f"a padding of {op.padding} is wider than the windows"
        known = all(isinstance(n, int) and n > 0 for n in weight.shape)
        yield known, f"the sizes of %{match.bindings['weight']} are not known"
        rows, columns = number(image.shape[1]), number(result.shape[1])
        yield rows % WIDEST == 0, f"{rows} channels do not fill vectors"
        panels = -(-columns // PANEL) * PANEL
        yield 4 * columns >= 3 * panels, f"{columns} columns fill less than three quarters of {panels}"
        lies = same_memory(result.shape, result.order, channels_last(4))
        yield lies and side_by_side(uses, match.bindings["image"]), "the images are not channels-last"
        pixels, tiles = hint(product((result.shape[0], *result.shape[2:]))), hint(tiles_of(result))
        yield tiles >= self.tiles, f"{tiles:.0f} tiles are fewer than {self.tiles}"
        yield 16 * tiles <= 6 * pixels, f"tiles of {tiles:.0f} x 4 results for {pixels:.0f}"

    def traffic(self, match: Match) -> Dim:
        uses, node = match.uses, match.root
        before, after = Graph("before"), Graph("after")
        names = {*node.inputs, self.filter(match)}
        now = {name: [g.input(name, uses.graph.tensors[name], Role.input) for g in (before, after)] for name in names}
        before.output(*before.emit(node.op, *(now[name][0] for name in node.inputs)))
        after.output(*self.emit(match, after, {name: values[1] for name, values in now.items()}))
        return simplify(traffic(after).bytes - traffic(before).bytes)

    def emit(self, match: Match, builder: Graph, now: Mapping[str, Value]) -> Iterable[Value]:
        op, image, weight = match.root.op, now[match.bindings["image"]], now[self.filter(match)]
        assert isinstance(op, Geometry)
        back = isinstance(op, ConvolutionInputGrad)
        padding = (2 - op.padding[0], 2 - op.padding[1]) if back else op.padding
        columns = number(match.uses.graph.tensors[match.root.outputs[0]].shape[1])
        made = PackedConvolution(
            columns=columns, kernel=(3, 3), stride=(1, 1), padding=padding, dilation=(1, 1), tiled=True
        )
        result = image.apply(made, weight.apply(WinogradFilter(input_gradient=back)))
        return (biased(result, [now[name] for name in match.bindings["added"]]),)

    def filter(self, match: Match) -> str:
        """The weight as it is before it is reordered for the library."""
        name: str = match.bindings["weight"]
        producer = match.uses.producers.get(name)
        return producer.inputs[0] if producer is not None and isinstance(producer.op, Reorder) else name


def tiles_of(images: Tensor) -> Dim:
    """The number of tiles of 2x2 pixels."""
    n, _, height, width = images.shape
    return simplify(n * ((height + 1) // 2) * ((width + 1) // 2))
