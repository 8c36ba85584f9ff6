"""Stages of equal range as one program: ready ones are trained together where that is measured to be faster.

A stacked step computes several trials with one launch per operator. Its sums may be taken in another order than those
of one trial, so this is chosen by the user (`Stages(stacked=16)`), and is part of the root: points of stacked and of
separate training are never mixed. What a stacked step cannot do is trained stage by stage.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from daceml_train.driver.stacked import StackedStep
from daceml_train.errors import Invalid, Unsupported
from daceml_train.trials.checks import noted
from daceml_train.trials.keys import Path
from daceml_train.trials.settings import Applied
from daceml_train.trials.state import State, Training, restore_generators
from daceml_train.trials.tree import Stage, Tree
from daceml_train.trials.values import same

MARGIN = 0.9
"""Stages are stacked if a step of all takes at most this share of as many single steps: copies come on top."""
SAMPLES = 5
"""How many steps are timed of each way."""


class Trainer(Protocol):
    """What is needed of `Stages`."""

    step: Any
    data: Any
    applied: Applied
    training: Training
    watched: Any
    store: Any

    def execute(self, stage: Stage) -> None:
        """Train a stage alone, and evaluate where trials end."""

    def state(self, path: Path, step: int, number: int) -> State:
        """The state at a point that has a checkpoint."""

    def first_trial(self, stage: Stage) -> int:
        """The lowest number of a trial that a stage is part of."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """One call at a time."""


class Apart(Exception):
    """These stages cannot be one program; the message says why."""


class Stacks:
    """The stages of `trainer`, up to `count` at once."""

    def __init__(self, trainer: Trainer, count: int) -> None:
        self.trainer, self.count = trainer, count
        self.refusal = ""
        """Why stages are trained alone, if they are."""
        self.together = 0
        """How many stages were trained together with others."""
        self._stack: StackedStep | None = None
        self._least = 2
        """The least number of stages that are faster together."""

    def train(self, tree: Tree, progress: Callable[[int, int], None] | None = None) -> None:
        """Train all stages of a tree, those with the earliest start first, so that many are ready at once."""
        ready, total, done = list(tree.root.children), sum(1 for _ in tree.stages()), 0
        while ready:
            group = self._group(ready, tree)
            if len(group) >= self._least and not self.refusal:
                try:
                    with self.trainer.session():
                        self._train(group)
                except Apart:  # others may fit
                    pass
                except Unsupported as why:
                    if group[0].start > 0:  # the first step of some optimizers creates their state
                        self.refusal = str(why)
            for stage in group:
                if progress is not None:
                    progress(done, total)
                self.trainer.execute(stage)
                ready.remove(stage)
                ready += stage.children
                done += 1

    def _group(self, ready: Sequence[Stage], tree: Tree) -> list[Stage]:
        """Ready stages of equal range with equal data, at most `count` of them, or one alone."""
        first = min(ready, key=lambda stage: (stage.start, -tree.longest(stage)))
        alike = [stage for stage in ready if (stage.start, stage.end) == (first.start, first.end)]
        batches = list(self._of_data(first))
        return [first, *(s for s in alike if s is not first and list(self._of_data(s)) == batches)][: self.count]

    def _of_data(self, stage: Stage) -> Iterator[tuple[int, Any]]:
        """The settings of data in a stage, by the step from which they are so."""
        last = None
        for segment in stage.path.between(stage.start, stage.end):
            now = [entry for entry in segment.settings if entry[0] in self.trainer.applied.of_data]
            if now != last:
                last = now
                yield segment.start, now

    # ---- several stages at once ---------------------------------------------------------------------------------
    def _train(self, group: Sequence[Stage]) -> None:
        """Train those stages of a group that have no checkpoint at their ends. Raises `Apart`, before anything is
        saved, where they cannot be one program.
        """
        trainer = self.trainer
        with contextlib.ExitStack() as locks:
            for point in sorted((stage.end, stage.key) for stage in group):
                locks.enter_context(trainer.store.lock(point))
            left = [stage for stage in group if not trainer.store.has((stage.end, stage.key))]
            if len(left) < self._least:
                return
            numbers = [trainer.first_trial(stage) for stage in left]
            states = [trainer.state(s.path, s.start, n) for s, n in zip(left, numbers, strict=True)]
            if not all(same(state["generators"], states[0]["generators"]) for state in states[1:]):
                raise Apart("their random numbers differ")
            stack = self._loaded(left, states)
            if len(left) < self._least:  # measured just now
                return
            began, at = time.perf_counter(), time.time()
            self._run(stack, left, numbers)
            seconds = (time.perf_counter() - began) / len(left)
            for row, (stage, number) in enumerate(zip(left, numbers, strict=True)):
                trainer.applied.apply(dict(stage.path.settings(stage.end - 1)))
                stack.store(row)
                trainer.store.save((stage.end, stage.key), trainer.training.snapshot(), number)
                entry = {"trial": number, "start": stage.start, "end": stage.end, "key": stage.key}
                entry |= {"before": stage.path.key(stage.start), "settings": stage.path.settings(stage.start)}
                trainer.store.record(**entry, at=at, seconds=seconds)
            self.together += len(left)

    def _loaded(self, group: Sequence[Stage], states: Sequence[State]) -> StackedStep:
        """The stacked step with the states of stages in its rows; spare rows are copies of the first one."""
        trainer = self.trainer
        with noted(lambda: f"in step {group[0].start} of trials that are one program"):
            arguments = self._arguments(group[0], group[0].start)
        trainer.training.restore(states[0])
        trainer.applied.apply(dict(group[0].path.settings(group[0].start)))
        stack = self._stack
        if stack is None or not stack.read(0, *arguments):  # another kind of batch, or tensors of a later beginning
            stack = StackedStep(trainer.step, self.count, *arguments)
            if trainer.step.optimizer.state and not any(states[0]["optimizer"]):
                raise Apart("the first step of the optimizer creates its state")
            if self._stack is None:
                self._measure(stack, arguments)
            self._stack = stack
        rows = [*zip(group, states, strict=True), *[(group[0], states[0])] * (self.count - len(group))]
        for row, (stage, state) in enumerate(rows):
            trainer.training.restore(state)
            trainer.applied.apply(dict(stage.path.settings(stage.start)))
            stack.load(row)
            if not stack.read(row, *arguments):
                raise Apart("a setting asks for another program")
        restore_generators(states[0]["generators"])
        return stack

    def _measure(self, stack: StackedStep, arguments: tuple[Any, ...]) -> None:
        """Find from which number of stages on a step of all is faster. What the steps change is restored later."""
        stack.load(0)
        if not stack.read(0, *arguments):
            raise Apart("a setting asks for another program")
        together = min(_seconds(lambda: stack(*arguments)) for _ in range(SAMPLES))
        single = min(_seconds(lambda: self.trainer.step(*arguments)) for _ in range(SAMPLES))
        self._least = max(2, int(together / (MARGIN * single)) + 1)
        if self._least > self.count:
            ratio = single * self.count / together
            self.refusal = f"{self.count} trials in one program are {ratio:.2f} times as fast as one at a time"

    def _run(self, stack: StackedStep, group: Sequence[Stage], numbers: Sequence[int]) -> None:
        trainer, first = self.trainer, group[0]
        changes: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for row, stage in enumerate(group):
            for segment in stage.path.between(stage.start, stage.end):
                changes.setdefault(segment.start, []).append((row, dict(segment.settings)))
        trials = ", ".join(map(str, numbers))
        with noted(lambda: f"in step {first.start} of the trials {trials}, which are one program"):
            trainer.watched["data"].check()
            trainer.watched["data"].ask_twice(first.start, dict(first.path.settings(first.start)))
        for step in range(first.start, first.end):
            try:
                arguments = self._arguments(first, step)
                for row, settings in changes.get(step, ()):
                    trainer.applied.apply(settings)
                    if not stack.read(row, *arguments):
                        raise Apart("a setting asks for another program")
                stack(*arguments)
            except Invalid as error:
                raise Apart(str(error)) from error
            except Exception as error:
                error.add_note(f"daceml_train: in step {step} of the trials {trials}, which are one program")
                raise

    def _arguments(self, stage: Stage, step: int) -> tuple[Any, ...]:
        found = self.trainer.data(step, dict(stage.path.settings(step)))
        return tuple(found) if isinstance(found, tuple | list) else (found,)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


__all__ = ["Stacks"]
