"""The axes of a kernel while its statements are read: they are unified, and split where one is a part of another."""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.codegen.kernel.domain import divide
from daceml_train.tensor import Dim, same


class Unequal(Exception):
    """Two lists of axes have no common refinement."""


class Transposed(Exception):
    """Two axes of one value would become the same."""


class AxisTable:
    """Union-find over axes that can be split in two: an outer and an inner part."""

    def __init__(self) -> None:
        self.size: list[Dim] = []
        self.parent: list[int] = []
        self.parts: dict[int, tuple[int, int]] = {}
        self.users: list[set[int]] = []
        self.values = 0

    def new(self, size: Dim) -> int:
        self.size.append(size)
        self.parent.append(len(self.parent))
        self.users.append(set())
        return len(self.parent) - 1

    def dim(self, size: Dim) -> list[int]:
        """The axes of a fresh dimension: none for size 1."""
        return [] if same(size, 1) else [self.new(size)]

    def find(self, axis: int) -> int:
        while self.parent[axis] != axis:
            self.parent[axis] = self.parent[self.parent[axis]]
            axis = self.parent[axis]
        return axis

    def resolve(self, axes: Sequence[int]) -> list[int]:
        """The axes in terms of their current parts."""
        result: list[int] = []
        for axis in map(self.find, axes):
            result += self.resolve(self.parts[axis]) if axis in self.parts else [axis]
        return result

    def value(self, dims: Sequence[Sequence[int]]) -> None:
        """Record that these axes index one value, so no two of them may become equal."""
        self.values += 1
        for axis in self.resolve([a for dim in dims for a in dim]):
            if self.values in self.users[axis]:
                raise Transposed
            self.users[axis].add(self.values)

    def meet(self, a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> bool:
        """Whether one value is indexed by axes of both."""
        left, right = ({u for dim in dims for axis in self.resolve(dim) for u in self.users[axis]} for dims in (a, b))
        return bool(left & right)

    def join(self, a: int, b: int) -> None:
        if self.users[a] & self.users[b]:
            raise Transposed
        self.parent[b] = a
        self.users[a] |= self.users[b]

    def split(self, axis: int, outer: Dim, inner: Dim) -> int:
        """Split an axis; returns its inner part."""
        self.parts[axis] = (self.new(outer), self.new(inner))
        for part in self.parts[axis]:
            self.users[part] |= self.users[axis]
        return self.parts[axis][1]

    def unify(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Unify two lists of axes, splitting where needed, from the innermost axes outward."""
        left, right = list(a), list(b)
        while True:
            left, right = self.resolve(left), self.resolve(right)
            if not left or not right:
                break
            x, y = left[-1], right[-1]
            if x == y or same(self.size[x], self.size[y]):
                if x != y:
                    self.join(x, y)
                left.pop()
                right.pop()
            elif (outer := divide(self.size[y], self.size[x])) is not None:
                self.join(x, self.split(y, outer, self.size[x]))
            elif (outer := divide(self.size[x], self.size[y])) is not None:
                self.join(y, self.split(x, outer, self.size[y]))
            else:
                raise Unequal
        if any(not same(self.size[axis], 1) for axis in left + right):
            raise Unequal
