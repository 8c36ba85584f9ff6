"""WinogradConvolution: 3x3 convolutions and their gradients with 16 multiplications instead of 36."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.traffic import traffic
from daceml_train.codegen.library.matmul_epilogue import WIDEST
from daceml_train.codegen.library.winograd import tiles_of
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.convolution import Convolution, ConvolutionInputGrad, ConvolutionWeightGrad, Geometry
from daceml_train.ops.movement import Reorder
from daceml_train.ops.operator import Value
from daceml_train.ops.packed import PANEL, PackedConvolution
from daceml_train.ops.winograd import WinogradFilter, WinogradWeightGrad
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, DType, channels_last, hint, product, same_memory, same_shape, simplify
from daceml_train.transformations.layout.convolution_as_matmul import convolution_at, in_order
from daceml_train.transformations.layout.pack_weights import biased, number, side_by_side


@dataclass(frozen=True)
class WinogradConvolution(Rewrite):
    """Compute 3x3 convolutions with stride 1, and their gradients, in tiles of 2x2 results: F(2x2, 3x3).

        x, w -> [conv] -> y               =>     w -> [winograd filter] -> p;  x, p -> [packed convolution] -> y
        g, w -> [conv input grad] -> gx   =>     w -> [winograd filter] -> p;  g, p -> [packed convolution] -> gx
        g, x -> [conv weight grad] -> gw  =>     g, x -> [winograd weight grad] -> gw

    Tiles take 16 multiplications where windows take 36 (https://arxiv.org/abs/1509.09308). Filters are transformed in
    each step, which costs as much as some sixty tiles, so there must be at least `tiles`, half as many for the gradient
    of the weight, and a third fewer multiplications in all: small images fill their tiles badly. The pass handles
    float32 images that are channels-last, with channels that fill vectors. Results differ by slightly more rounding,
    and an infinity or NaN spreads to its tiles. Bytes: the library's reorders of the weight are saved; the transformed
    filter is written and read.
    """

    level = "layout"
    targets = ("cpu",)
    tiles: int = 100

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        conv = convolution_at(uses, node)
        if conv is None or len(getattr(conv.op, "stride", ())) != 2:
            return None
        return {"conv": conv}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, conv = match.uses, match.bindings["conv"]
        op, (y,) = conv.op, conv.outputs
        first, second, result = (uses.graph.tensors[name] for name in (*conv.inputs[:2], y))
        back = isinstance(op, ConvolutionWeightGrad)
        weight, images = (result, first) if back else (second, result)
        usual = {*op.stride, *op.dilation, op.groups} == {1} and set(op.output_padding) == {0} and not op.transposed
        yield usual and same_shape(weight.shape[2:], (3, 3)), "tiles are for windows of 3x3, each once"
        yield first.dtype is DType.float32, f"tiles are of f32, not of {first.dtype.short}"
        yield max(op.padding) <= 2, f"a padding of {op.padding} is wider than the windows"
        known = all(isinstance(n, int) and n > 0 for n in weight.shape)
        yield known, f"the sizes of the weight {weight} are not known"
        read = [(conv.inputs[0], first), (conv.inputs[1], second)] if back else [(conv.inputs[0], first)]
        for name, operand in read:
            yield number(operand.shape[1]) % WIDEST == 0, f"{operand.shape[1]} channels do not fill vectors"
            yield side_by_side(uses, name), f"the channels of %{name} are not adjacent in memory"
        columns = number(images.shape[1])
        panels = -(-columns // PANEL) * PANEL
        yield 4 * columns >= 3 * panels, f"{columns} columns fill less than three quarters of {panels}"
        yield back or same_memory(images.shape, images.order, channels_last(4)), f"%{y} is not channels-last"
        pixels, tiles = hint(product((images.shape[0], *images.shape[2:]))), hint(tiles_of(images.shape))
        fewest = self.tiles // 2 if back else self.tiles
        yield tiles >= fewest, f"{tiles:.0f} tiles are fewer than {fewest}"
        yield 16 * tiles <= 6 * pixels, f"{tiles:.0f} tiles have only {pixels:.0f} results"

    def traffic(self, match: Match) -> Dim:
        uses, conv, weight = match.uses, match.bindings["conv"], self.filter(match)
        before, after = Graph("before"), Graph("after")
        names = dict.fromkeys((*conv.inputs, weight))
        now = {name: [g.input(name, uses.graph.tensors[name], Role.input) for g in (before, after)] for name in names}
        operands = {name: values[0] for name, values in now.items()}
        if weight != conv.inputs[1] and uses.only_reader(conv.inputs[1], conv):  # the reorder goes, too
            operands[conv.inputs[1]] = operands[weight].apply(uses.producers[conv.inputs[1]].op)
        (last,) = before.emit(conv.op, *(operands[name] for name in conv.inputs))
        before.output(last if match.root is conv else last.apply(match.root.op))
        after.output(*self.emit(match, after, {name: values[1] for name, values in now.items()}))
        return simplify(traffic(after).bytes - traffic(before).bytes)

    def emit(self, match: Match, builder: Graph, now: Mapping[str, Value]) -> Iterable[Value]:
        conv: Node = match.bindings["conv"]
        op, result = conv.op, match.uses.graph.tensors[match.root.outputs[0]]
        assert isinstance(op, Geometry)
        first, *others = conv.inputs
        if isinstance(op, ConvolutionWeightGrad):
            made = now[first].apply(WinogradWeightGrad(padding=(op.padding[0], op.padding[1])), now[others[0]])
            return (in_order(made, result) if match.root.outputs[0] in match.uses.visible else made,)
        back = isinstance(op, ConvolutionInputGrad)
        rows, columns = (2 - p if back else p for p in op.padding)
        tiles = PackedConvolution(
            columns=number(result.shape[1]),
            kernel=(3, 3),
            stride=(1, 1),
            padding=(rows, columns),
            dilation=(1, 1),
            tiled=True,
        )
        filters = now[self.filter(match)].apply(WinogradFilter(input_gradient=back))
        added = [now[name] for name in others[1:]] if isinstance(op, Convolution) else []
        return (biased(now[first].apply(tiles, filters), added),)

    def filter(self, match: Match) -> str:
        """The second operand; a weight as it is before it is reordered for the library."""
        conv: Node = match.bindings["conv"]
        name = conv.inputs[1]
        producer = match.uses.producers.get(name)
        if isinstance(conv.op, ConvolutionWeightGrad) or producer is None or not isinstance(producer.op, Reorder):
            return name
        return producer.inputs[0]
