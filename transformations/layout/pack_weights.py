"""PackWeights: matmuls and convolutions with constant weights run in this package's own kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.aliases import is_alias, moved_strides
from daceml_train.analysis.traffic import traffic
from daceml_train.codegen.library.matmul_epilogue import WIDEST
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.convolution import Convolution
from daceml_train.ops.movement import Expand
from daceml_train.ops.operator import Value
from daceml_train.ops.packed import (
    PackedConvolution,
    PackedDepthwise,
    PackedMatmul,
    packed,
    packed_filter,
    packed_filters,
)
from daceml_train.ops.winograd import WinogradFilter
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import (
    Dim,
    DType,
    Tensor,
    channels_last,
    hint,
    product,
    same,
    same_memory,
    same_shape,
    simplify,
)

WIDE = 7
"""The largest number of columns of a depthwise filter whose row fits in registers."""


@dataclass(frozen=True)
class PackWeights(Rewrite):
    """Run a matmul or convolution in this package's own kernel, with a weight that is packed in advance.

        x, w -> [convolution] -> y     =>     w -> [pack] -> p;  x, p -> [packed convolution] -> y
        a, b -> [matmul] -> y          =>     b -> [pack] -> p;  a, p -> [packed matmul] -> y

    It applies to weights that depend on parameters and buffers alone, in a graph without updates: packing runs once,
    and a later `common_subexpressions` lets matmuls with the same weight share it. A bias is added after the matmul,
    where `fuse_matmul_epilogue` absorbs it. The pass handles float32 matmuls of at least `fewest` columns, and
    convolutions of images without groups or with one filter per channel; the library runs the others. 3x3 convolutions
    with stride 1 are computed in tiles of 2x2 results (F(2x2, 3x3), https://arxiv.org/abs/1509.09308) where the result
    has at least `tiled` pixels and the channels fill whole vectors: 2.25 times fewer multiplications, with a weight
    1.8 times as large. Results then differ by slightly more rounding; -1 disables these tiles.
    """

    level = "layout"
    targets = ("cpu",)
    fewest: int = 8
    tiled: int = 96

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        match node.op:
            case MatmulAdd():
                *added, x, weight = node.inputs
            case Matmul() | Convolution():
                x, weight, *added = node.inputs
            case _:
                return None
        return {"x": x, "weight": weight, "added": added}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, op, (y,) = match.uses, match.root.op, match.root.outputs
        x, weight = (uses.graph.tensors[match.bindings[name]] for name in ("x", "weight"))
        result = uses.graph.tensors[y]
        yield (
            match.bindings["weight"] in uses.held,
            f"the weight %{match.bindings['weight']} may differ from call to call",
        )
        yield x.dtype is DType.float32, f"packed matmuls support f32, not {x.dtype.short}"
        if isinstance(op, Convolution):
            yield len(op.stride) == 2, f"{op.label} of {len(op.stride)} dimensions: packed convolutions support images"
            yield not op.transposed, f"a transposed {op.label} adds up windows"
            fits = op.groups == 1 or depthwise(op, weight)
            yield fits, f"{op.groups} groups of several channels, or filters with gaps or of more than {WIDE} columns"
            lies = same_memory(result.shape, result.order, channels_last(4))
            yield lies, f"%{y} is not channels-last"
            there = op.groups == 1 or side_by_side(uses, match.bindings["x"])
            yield there, f"the channels of %{match.bindings['x']} are not adjacent in memory"
        else:
            yield x.rank == 2, f"{op.label} of a batch"
            yield getattr(op, "chunks", 1) == 1, "the matmul is computed in chunks"
        sizes = (*weight.shape, x.shape[1])
        yield (
            all(isinstance(n, int) and n > 0 for n in sizes),
            f"the sizes of %{match.bindings['weight']} are not known",
        )
        columns = weight.shape[0 if isinstance(op, Convolution) else 1]
        enough = isinstance(columns, int) and columns >= self.fewest
        yield enough, f"{columns} columns are fewer than {self.fewest}"

    def traffic(self, match: Match) -> Dim:
        """Added bytes; packing counts although it runs once."""
        uses, node = match.uses, match.root
        before, after = Graph("before"), Graph("after")
        now = {
            name: [g.input(name, uses.graph.tensors[name], Role.input) for g in (before, after)] for name in node.inputs
        }
        before.output(*before.emit(node.op, *(now[name][0] for name in node.inputs)))
        after.output(*self.emit(match, after, {name: values[1] for name, values in now.items()}))
        return simplify(traffic(after).bytes - traffic(before).bytes)

    def emit(self, match: Match, builder: Graph, now: Mapping[str, Value]) -> Iterable[Value]:
        op = match.root.op
        x, weight = (now[match.bindings[name]] for name in ("x", "weight"))
        added = [now[name] for name in match.bindings["added"]]
        if isinstance(op, Convolution):
            result = self.convolved(match, op, x, weight)
        else:
            result = x.apply(PackedMatmul(columns=number(weight.shape[1])), packed(weight))
        return (biased(result, added),)

    def convolved(self, match: Match, op: Convolution, x: Value, weight: Value) -> Value:
        """The convolution without its bias."""
        options: dict[str, Any] = {"columns": number(weight.shape[0]), "kernel": weight.shape[2:]}
        options |= {"stride": op.stride, "padding": op.padding}
        if op.groups > 1:
            return x.apply(PackedDepthwise(**options), packed_filters(weight))
        options |= {"dilation": op.dilation, "tiled": self.in_tiles(match, op, weight)}
        filters = weight.apply(WinogradFilter()) if options["tiled"] else packed_filter(weight)
        return x.apply(PackedConvolution(**options), filters)

    def in_tiles(self, match: Match, op: Convolution, weight: Value) -> bool:
        """Whether a convolution is computed in tiles."""
        y = match.uses.graph.tensors[match.root.outputs[0]]
        three = same_shape(weight.shape[2:], (3, 3)) and {*op.stride, *op.dilation} == {1}
        whole = number(weight.shape[1]) % WIDEST == 0 and side_by_side(match.uses, match.bindings["x"])
        return self.tiled >= 0 and three and whole and hint(product((y.shape[0], *y.shape[2:]))) >= self.tiled


def side_by_side(uses: Uses, name: str) -> bool:
    """Whether the channels of images are adjacent and distinct in memory."""
    tensors, base, chain = uses.graph.tensors, name, list[Node]()
    while (producer := uses.producers.get(base)) is not None and is_alias(producer.op):
        if isinstance(producer.op, Expand):
            return False
        chain.append(producer)
        base = producer.inputs[0]
    strides = tensors[base].strides
    for node in reversed(chain):
        before, after = tensors[node.inputs[0]].shape, tensors[node.outputs[0]].shape
        moved = moved_strides(node.op, before, strides, after)
        strides = Tensor(after).strides if moved is None else moved  # which is a copy
    lies = same_memory(tensors[name].shape, tensors[name].order, channels_last(4))
    return lies and same(strides[1], 1)


def number(size: Dim) -> int:
    """A size that is a known number."""
    assert isinstance(size, int)
    return size


def depthwise(op: Convolution, weight: Tensor) -> bool:
    """Whether there is a kernel for this depthwise convolution."""
    one = same(weight.shape[1], 1) and same(weight.shape[0], op.groups)
    narrow = isinstance(weight.shape[-1], int) and weight.shape[-1] <= WIDE
    return one and narrow and set(op.dilation) == {1} and len(set(op.stride)) == 1 and op.stride[0] <= 2


def biased(result: Value, added: Sequence[Value]) -> Value:
    """A matmul plus the operand that is added to it: a bias per channel of images, else one that broadcasts."""
    for other in added:
        channels = len(result.shape) == 4
        result = result + (other.view((1, other.shape[0], 1, 1)) if channels else other)
    return result
