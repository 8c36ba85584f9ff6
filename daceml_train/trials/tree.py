"""The stage tree: trials merged where their settings are equal, cut where they differ.

A stage is a part of a path between two points at which something happens: a fork, the end of a trial, a rung. Chains
of stages without a fork are one stage, however often their settings change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from daceml_train.trials.keys import Path


@dataclass(eq=False)
class Stage:
    """Steps `start` to `end` of `path`; `trials` are the numbers of those that end here or have a rung here."""

    path: Path
    start: int
    end: int
    parent: Stage | None = None
    children: list[Stage] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.end - self.start

    @property
    def key(self) -> str:
        """The key of the point at the end."""
        return self.path.key(self.end)

    @property
    def is_fork(self) -> bool:
        """Whether training goes on from the end in more than one way."""
        return len(self.children) > 1

    def __repr__(self) -> str:
        return f"<steps {self.start} to {self.end}, {len(self.children)} children, trials {self.trials}>"


class Tree:
    """Stages of all trials that were added; more may follow at any time."""

    def __init__(self, root: str) -> None:
        self.root = Stage(Path(root, {}, 1), 0, 0)
        self.requested = 0
        """The steps of all trials, each alone."""
        self._longest: dict[int, int] = {}

    def add(self, number: int, path: Path, until: Sequence[int] | None = None) -> Stage:
        """Add a trial with its rungs, by default its end alone; the stage at its end."""
        if path.root != self.root.path.root:
            raise ValueError("a trial of another root")
        rungs = sorted(set(until or (path.end,)))
        node, position, reached = self.root, 0, 0
        for rung in rungs:
            node, position = self._follow(node, path, position, rung)
            if number not in node.trials:
                node.trials.append(number)
            reached = rung
        self.requested += reached
        self._longest.clear()
        return node

    def _follow(self, node: Stage, path: Path, position: int, end: int) -> tuple[Stage, int]:
        """The stage that ends at `end` on this path, cut or made, starting from the end of `node`."""
        while position < end:
            for child in node.children:
                common = path.diverges(child.path, position, min(end, child.end))
                if common > position:
                    break
            else:
                child = Stage(path, position, end, node)
                node.children.append(child)
                return child, end
            if common < child.end:
                _split(child, common)
            node, position = child, common
        return node, position

    def stages(self) -> Iterator[Stage]:
        """All stages, parents first."""
        todo = list(reversed(self.root.children))
        while todo:
            stage = todo.pop()
            yield stage
            todo += reversed(stage.children)

    def steps(self) -> int:
        """The steps of all stages."""
        return sum(stage.steps for stage in self.stages())

    def forks(self) -> set[tuple[int, str]]:
        """All points with more than one continuation, by step and key."""
        return {(stage.end, stage.key) for stage in self.stages() if stage.is_fork}

    def longest(self, stage: Stage) -> int:
        """The steps from the stage's start to the end of the deepest one below it."""
        if id(stage) not in self._longest:
            for below in reversed(list(_below(stage))):
                deepest = max((self._longest[id(child)] for child in below.children), default=0)
                self._longest[id(below)] = below.steps + deepest
        return self._longest[id(stage)]

    def ordered(self) -> Iterator[Stage]:
        """All stages as one worker runs them: a stage's longest continuation last, when nothing else needs its end."""
        todo = sorted(self.root.children, key=self.longest, reverse=True)
        while todo:
            stage = todo.pop()
            yield stage
            todo += sorted(stage.children, key=self.longest, reverse=True)


def merged(root: str, trials: Iterable[tuple[Path, Sequence[int] | None]]) -> Tree:
    """The tree of trials, numbered in order."""
    tree = Tree(root)
    for number, (path, until) in enumerate(trials):
        tree.add(number, path, until)
    return tree


def _split(stage: Stage, position: int) -> None:
    """Cut a stage in two at `position`; what ended at its end ends at that of the second part."""
    rest = Stage(stage.path, position, stage.end, stage, stage.children, stage.trials)
    for child in rest.children:
        child.parent = rest
    stage.end, stage.children, stage.trials = position, [rest], []


def _below(stage: Stage) -> Iterator[Stage]:
    todo = [stage]
    while todo:
        now = todo.pop()
        yield now
        todo += now.children


__all__ = ["Stage", "Tree", "merged"]
