"""Duplicate: a cheap value is recomputed in each reader instead of being stored and read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daceml_train.analysis.device_model import CPU_BALANCE, DeviceModel
from daceml_train.graph.graph import Graph
from daceml_train.ops.random import Uniform
from daceml_train.passes.base import Candidate, Measured, Pass
from daceml_train.tensor import Tensor
from daceml_train.transformations.fusion.grouping import CONSTANT, MOVEMENT, POINTWISE, Group, Grouping, Item
from daceml_train.transformations.fusion.repetition import FLOPS, OFTEN, spent, times
from daceml_train.transformations.fusion.siblings import magnitude

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class DuplicateCheapProducers(Pass):
    """Recompute a value in each kernel that needs it, from arrays that are in memory anyway, where that moves less.

        x -> [f] -> t, y;   t -> [g] -> z      =>      x -> [f] -> y,   x -> [f; g] -> z

    Normalized activations are recomputed from the convolution's output; random numbers and their masks depend on a
    seed alone, so they are never stored. `flops` bounds the operations per element that a value may cost (None: what
    the device does while it moves a float32, 64 on a CPU), and `repeated` those of one that a kernel would compute 8
    times or more, because it has dimensions that the value lacks.
    """

    level = "fusion"
    flops: int | None = None
    repeated: int = FLOPS
    limit: int = 96

    @property
    def most(self) -> int:
        """Operations per element that a value may cost."""
        return round(CPU_BALANCE * FLOAT) if self.flops is None else self.flops

    def on(self, model: DeviceModel) -> Pass:
        return self if self.flops is not None else replace(self, flops=round(model.balance * FLOAT))

    def run(self, graph: Graph) -> Graph:
        grouping = Grouping(graph)
        for group in grouping.groups():
            while group.fusible and (found := self.candidate(grouping, group)) is not None:
                for name in found:
                    grouping.copy_into(group, name)
        return grouping.build()

    def matches(self, graph: Graph) -> list[Candidate]:
        """Values that a kernel of the current graph should recompute."""
        grouping = Grouping(graph)
        found = ((group, self.candidate(grouping, group)) for group in grouping.groups() if group.fusible)
        return [self.match(grouping, group, names) for group, names in found if names is not None]

    def match(self, grouping: Grouping, group: Group, names: list[str]) -> Measured:
        """The match that copies the operators that produce `names` into `group`."""
        reader = grouping.made(group)[-1]

        known = tuple(n for n in names if n in grouping.graph.tensors)

        def apply() -> Graph:
            own = Grouping(grouping.graph)
            again = own.producer[reader].group
            assert again is not None
            for name in names:
                own.copy_into(again, name)
            return own.build()

        where = f"%{names[0]} in the kernel of %{reader}"
        return Measured(self, grouping.graph, where, (*known, reader), apply)

    def candidate(self, grouping: Grouping, group: Group) -> list[str] | None:
        """Arrays that `group` should recompute, each reading the next; None if that gains nothing."""
        reads = grouping.reads(group)
        bases = {grouping.source(name)[0] for name in reads}
        for name in reads:
            base = grouping.source(name)[0]
            producer = grouping.producer.get(base)
            if producer is None or producer.group is None or magnitude(grouping.tensors[base].size) < 2:
                continue
            most = float(self.most)
            if times(grouping, name, group) >= OFTEN:
                most = min(most, self.repeated - spent(grouping, group))
            cone = self.cone(grouping, name, bases, most)
            if cone is None or len(group.items) + len(cone) > self.limit:
                continue
            items = frozenset(grouping.producer[grouping.source(n)[0]] for n in cone)
            if grouping.refusal_of_copies(group, items) is None:
                return cone
        return None

    def cone(self, grouping: Grouping, name: str, bases: set[str], most: float) -> list[str] | None:
        """The results of the operators from arrays in memory to `name`, last first; None if they take more than `most`
        operations per element, or would read as many bytes as they save.
        """
        base = grouping.source(name)[0]
        tensor = grouping.tensors[base]
        order: dict[str, None] = {}
        extra: dict[str, None] = {}
        flops = 0.0
        todo = [name]
        while todo:
            array = todo.pop(0)
            if array in order:
                continue
            producer = grouping.producer[grouping.source(array)[0]]
            order[array] = None
            flops += magnitude(producer.op.flops(*(grouping.tensors[i] for i in producer.inputs)))
            for operand in producer.inputs:
                source = grouping.source(operand)[0]
                if source in bases:
                    continue
                if self.inner(grouping, source):
                    todo.append(operand)
                elif not self.resident(grouping, source):
                    if not self.storable(grouping, source, tensor):
                        return None
                    extra[source] = None
                elif not self.constant(grouping, source):
                    extra[source] = None
        readers = {id(r.group) for r in grouping.consumers(base)} - {id(grouping.producer[base].group)}
        saved = magnitude(tensor.bytes) * (1 + (base not in grouping.visible) / max(len(readers), 1))
        copied = {grouping.source(n)[0] for n in order}
        if flops > most * magnitude(tensor.size) or not all(self.pointwise(grouping, c) for c in copied):
            return None
        return list(order) if sum(magnitude(grouping.tensors[e].bytes) for e in extra) < saved else None

    def constant(self, grouping: Grouping, array: str) -> bool:
        producer = grouping.producer.get(array)
        return producer is not None and isinstance(producer.op, CONSTANT)

    def resident(self, grouping: Grouping, array: str) -> bool:
        """Whether an array is in memory, or a constant: reading it adds no result to the kernel that produces it."""
        producer = grouping.producer.get(array)
        return producer is None or producer.group is None or grouping.seen_outside(array, [producer.group])

    def storable(self, grouping: Grouping, array: str, instead: Tensor) -> bool:
        """Whether the kernel that produces `array` may store it too, at a cost that is small against the savings."""
        producer = grouping.producer[array]
        assert producer.group is not None
        small = magnitude(grouping.tensors[array].bytes) * 8 <= magnitude(instead.bytes)
        return small and grouping.refusal_of_result(producer.group, array) is None

    def pointwise(self, grouping: Grouping, array: str) -> bool:
        """Whether an array is computed element by element; movement within a kernel counts as such."""
        producer: Item | None = grouping.producer.get(array)
        return producer is not None and isinstance(producer.op, (*POINTWISE, *MOVEMENT, Uniform))

    def inner(self, grouping: Grouping, array: str) -> bool:
        """Whether the cone continues through an array: it is not in memory otherwise, or depends on constants and
        scalars alone.
        """
        producer = grouping.producer.get(array)
        if producer is None or producer.group is None or not self.pointwise(grouping, array):
            return False
        return not grouping.seen_outside(array, [producer.group]) or self.free(grouping, array)

    def free(self, grouping: Grouping, array: str) -> bool:
        """Whether an array is computed from constants and 0-d values alone."""
        producer = grouping.producer.get(array)
        if producer is None:
            return grouping.tensors[array].rank == 0
        if isinstance(producer.op, CONSTANT):
            return True
        sources = (grouping.source(i)[0] for i in producer.inputs)
        return self.pointwise(grouping, array) and all(self.free(grouping, s) for s in sources)
