"""A plan: what the trials of a search have in common, told before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.trials.keys import Path
from daceml_train.trials.simulate import Makespan, simulate
from daceml_train.trials.tree import Stage, Tree, merged


@dataclass(frozen=True)
class Plan:
    """The tree of some trials. Printed, it tells what merging saves, and which settings keep trials apart."""

    tree: Tree
    trials: int
    distinct: int
    parted: dict[str, tuple[int, int]]
    """Per setting, the number of forks at which it differs, and the earliest step of one."""

    @classmethod
    def of(cls, root: str, paths: Sequence[Path], rungs: Sequence[int]) -> Plan:
        """The plan of trials that end after the last of `rungs` steps."""
        tree = merged(root, [(path, rungs) for path in paths])
        distinct = len({path.key(path.end) for path in paths})
        return cls(tree, len(paths), distinct, _parted(tree))

    @property
    def steps(self) -> int:
        """The steps that are trained."""
        return self.tree.steps()

    @property
    def requested(self) -> int:
        """The steps of all trials, each alone."""
        return self.tree.requested

    @property
    def ratio(self) -> float:
        """How many times fewer steps are trained."""
        return self.requested / max(self.steps, 1)

    def makespan(self, workers: int, save: float = 0.0, load: float = 0.0) -> Makespan:
        """The time on some workers, in steps; `save` and `load` are those of a checkpoint."""
        return simulate(self.tree, workers, 1.0, save, load)

    def __str__(self) -> str:
        lines = [
            f"{self.trials} trials, {self.distinct} of them distinct: {self.requested:,} steps one by one, "
            f"{self.steps:,} by stages, {self.ratio:.2f} times fewer"
        ]
        for name, (forks, first) in sorted(self.parted.items(), key=lambda item: item[1][1]):
            where = "from the first step on" if first == 0 else f"from step {first} on"
            lines.append(f"  {name} parts trials at {forks} point{'s' * (forks != 1)}, {where}")
        if self.distinct > 1 and self.ratio < 1.05:
            lines.append(
                "  next to nothing is shared: continuous values and schedules that differ from the start keep trials "
                "apart; discrete values that change late let them share"
            )
        return "\n".join(lines)


def _parted(tree: Tree) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for stage in (tree.root, *tree.stages()):
        for name in _differing(stage.children):
            forks, first = found.get(name, (0, stage.end))
            found[name] = forks + 1, min(first, stage.end)
    return found


def _differing(children: Sequence[Stage]) -> list[str]:
    """The settings that are not the same in the first step of all children."""
    first = [dict(child.path.settings(child.start)) for child in children]
    names = sorted({name for settings in first for name in settings})
    return [name for name in names if len({repr(settings.get(name)) for settings in first}) > 1]


__all__ = ["Plan"]
