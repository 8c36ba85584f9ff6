"""Repetition: how often a kernel would compute a value again because it has dimensions that the value lacks."""

from __future__ import annotations

from collections.abc import Iterator

from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.movement import Expand
from daceml_train.tensor import Dim, Shape, product, same
from daceml_train.transformations.fusion.grouping import Group, Grouping, Item
from daceml_train.transformations.fusion.siblings import magnitude

OFTEN = 8
"""How often a costly value may be computed in one kernel, at most."""
FLOPS = 9
"""Operations per element that a kernel may spend on values which it computes often."""
IMAGE, CHANNEL = 4, 1
"""Dimensions of an array that may hold images, and which of these then counts channels."""
WORK = 150_000
"""Operations that are worth a kernel of their own: 5 us of a core that computes 16 elements at a time."""


def repeated(grouping: Grouping, producer: Group, consumer: Group, flops: int) -> bool:
    """Whether values of `producer` would be computed often in `consumer`, which would then spend more than `flops` per
    element on such values, and more time than it takes to read them.
    """
    again = max((times(grouping, name, consumer) for name in _read(grouping, producer, consumer)), default=1.0)
    if again < OFTEN:
        return False
    each = spent(grouping, consumer) + sum(_each(grouping, item) for item in producer.items)
    return each > flops and each * max(_size(grouping, item) for item in consumer.items) > WORK


def spent(grouping: Grouping, group: Group) -> float:
    """Operations per element of a kernel on values with fewer elements than it has, but for single numbers."""
    most = max(_size(grouping, item) for item in group.items)
    return sum(_each(grouping, item) for item in group.items if 1 < _size(grouping, item) <= most / OFTEN)


def _read(grouping: Grouping, producer: Group, consumer: Group) -> Iterator[str]:
    for name in grouping.reads(consumer):
        item = grouping.producer.get(grouping.source(name)[0])
        if item is not None and item.group is producer:
            yield name


def _size(grouping: Grouping, item: Item) -> float:
    return max(magnitude(grouping.tensors[name].size) for name in (*item.inputs, *item.outputs))


def _each(grouping: Grouping, item: Item) -> float:
    flops = magnitude(item.op.flops(*(grouping.tensors[i] for i in item.inputs)))
    return flops / max(_size(grouping, item), 1)


def times(grouping: Grouping, name: str, consumer: Group) -> float:
    """How many elements of `consumer` read each element of an array, where loops do not compute it once for them."""
    base, path = grouping.source(name)
    found, shape = 1.0, grouping.tensors[base].shape
    for item in reversed(path):
        wider = grouping.tensors[item.outputs[0]].shape
        found *= magnitude(_added(shape, wider)) if isinstance(item.op, Expand) else 1.0
        shape = wider
    readers = (r for r in grouping.readers[name] if r.group is consumer and isinstance(r.op, Elementwise | Expand))
    return found * max(
        (magnitude(_added(shape, grouping.tensors[r.outputs[0]].shape)) for r in readers),
        default=1.0,
    )


def _added(shape: Shape, wider: Shape) -> Dim:
    """The elements of dimensions along which an array is repeated; 1 if these are the last ones, or all: a loop over
    the others computes the value once. Not the pixels of images, whose channels may become the innermost loop.
    """
    shape = (1,) * (len(wider) - len(shape)) + tuple(shape)
    new = [d for d, (a, b) in enumerate(zip(shape, wider, strict=True)) if same(a, 1) and not same(b, 1)]
    own = [d for d, a in enumerate(shape) if not same(a, 1)]
    pixels = len(wider) >= IMAGE and own[-1:] == [CHANNEL]
    once = not own or (new and own[-1] < new[0] and not pixels)
    return 1 if once else product(wider[d] for d in new)


__all__ = ["FLOPS", "OFTEN", "repeated", "spent", "times"]
