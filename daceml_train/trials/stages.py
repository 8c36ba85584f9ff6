"""Stages: trials on one training step, in which steps that trials have in common run once.

A stage trains from one saved point to the next. Points are saved at rungs and ends of trials, and where trials part:
at the forks of trials that are known beforehand, and where settings change of those that arrive one by one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from daceml_train.driver.choices import share_choices
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid
from daceml_train.trials.checkpoints import Point, Store
from daceml_train.trials.checks import (
    as_names,
    as_rungs,
    as_steps,
    as_trials,
    as_values,
    check_functions,
    check_numbers,
    check_options,
    check_progress,
    noted,
    number_of,
    of_trial,
    said,
)
from daceml_train.trials.fingerprints import Seen
from daceml_train.trials.keys import Path, Segment, digest
from daceml_train.trials.plan import Plan
from daceml_train.trials.ray_tune import train
from daceml_train.trials.recipe import Recipe, rebuilt
from daceml_train.trials.report import Report
from daceml_train.trials.root import root_parts
from daceml_train.trials.settings import Applied
from daceml_train.trials.stacks import Stacks
from daceml_train.trials.state import State, Stateful, Training, generators, restore_generators, seeded
from daceml_train.trials.tree import Stage, Tree, merged
from daceml_train.trials.watched import watched
from daceml_train.trials.ways import fixed, is_settled, settle

MOST_CHANGES = 64
"""At how many steps checkpoints are saved because settings changed there in some trial."""

Trial = Mapping[str, Any]
"""The settings of a trial: each a value, or a schedule of values."""


class Stages:
    """`for steps, value in stages.run(trial, settings, until=(10, 40, 160)): ...`

    `step` is a `daceml_train.training_step`. `data(step, settings)` returns the arguments of the step with this number,
    a function of these two and of PyTorch's generator alone. `evaluate(model)` returns a number, or a dictionary or
    list of numbers, and moves nothing that training depends on.

    Settings: `lr` and other options of the optimizer are set in all its parameter groups, `lr[1]` in one of them;
    `batch` is for `data`, as are the names in `data_settings`; all further ones are handed to `apply(settings)` when
    one of them changes. An option that a trial does not name is as the optimizer has it now.

    `storage` is a folder that studies and processes share; without one, checkpoints are kept in memory alone, of which
    copies take `memory` bytes at most. `seed` is that of all generators, which otherwise start as they are now.
    `name` stands for data and functions that have no text to compare. `also` are objects with `state_dict()` that
    training moves, by name. Where settings change after fewer than `spacing` equal steps, nothing is saved. `save_at`
    names steps at which trials that arrive one by one may part.

    `run_all` trains up to `stacked` stages of equal range as one program where that is faster. Sums may then be taken
    in another order: trials equal separate ones up to rounding, and share no points with those that are bit-equal.

    Pickled, as Ray does it, it is a recipe: the model, the optimizer, and where they started.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        data: Callable[[int, dict[str, Any]], Any],
        evaluate: Callable[[Any], Any] | None = None,
        storage: str | os.PathLike[str] | None = None,
        apply: Callable[[dict[str, Any]], Any] | None = None,
        data_settings: Sequence[str] = ("batch",),
        seed: int | None = None,
        name: str | None = None,
        also: Mapping[str, Stateful] | None = None,
        memory: int = 2**30,
        spacing: int = 2,
        save_at: Iterable[int] = (),
        stacked: int = 1,
    ) -> None:
        check_functions(step, data, evaluate, apply)
        check_numbers(memory=memory, spacing=spacing, stacked=stacked)
        check_options(step, seed, name, also, storage, stacked)
        save_at, data_settings = as_steps(save_at), as_names(data_settings)
        self.step, self.data, self.evaluate, self.spacing = step, data, evaluate, spacing
        self.options: dict[str, Any] = {"data": data, "evaluate": evaluate, "storage": storage, "apply": apply}
        self.options |= {"data_settings": data_settings, "name": name, "also": also, "memory": memory}
        self.options |= {"spacing": spacing, "save_at": save_at, "stacked": stacked}
        """What another process needs besides the step, see `recipe`."""
        self.training = Training(step, also)
        self.applied = Applied(step.optimizer, apply, data_settings)
        start = self.training.snapshot()
        if seed is not None:
            start["generators"] = seeded(int(seed))
        seen: dict[str, Seen] = {}
        functions = {"data": data, "apply": apply, "evaluate": evaluate}
        self.parts = root_parts(self.training, start, functions, name, seen)
        self.evaluation = self.parts.pop("evaluate")
        if stacked != 1:
            self.parts["stacked"] = str(stacked)
        self.root = digest(*(text for item in sorted(self.parts.items()) for text in item))
        self.watched = watched(functions, seen, self.training.own())
        """What data and evaluate refer to, which must stay as it is."""
        self.store = Store(self.root, storage, memory, self.parts)
        self.tree = Tree(self.root)
        """What this object was asked for."""
        self._forks: dict[int, set[str]] = {}
        """The forks of trials that are known beforehand, by step."""
        self._planned: set[str] = set()
        """The ends of these trials: on their way, only forks and rungs are saved."""
        self._changes: set[int] = set(self.options["save_at"])
        """Where trials may part that arrive one by one: where settings of earlier ones changed."""
        self.stacks = None if stacked == 1 else Stacks(self, stacked)
        """What trains several stages at once."""
        self.name_of_run = uuid.uuid4().hex
        """Tells what this object is asked for from what others on the same storage are; a pool is one."""
        self._start = start
        self._live: Point | None = None
        """The point at which the model is, while a call runs."""
        self._settled = False
        """Whether it is known in which way the step runs."""
        self._last: tuple[Point, State] = (0, self.root), start
        self._threads = torch.get_num_threads()
        self._lock = threading.RLock()

    # ---- what users call ----------------------------------------------------------------------------------------
    def run(self, trial: Any, settings: Trial, until: int | Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Train a trial to each number of steps in `until`, and yield it with the value there.

        `trial` is a number, or has one, as Optuna's trials do. Nothing of a trial is trained that another one with the
        same settings up to there has trained. The caller may stop at any time.
        """
        rungs = as_rungs(until)
        path = self.path(settings, rungs[-1])
        return self.values(number_of(trial), path, rungs)

    def run_all(
        self,
        trials: Iterable[Trial],
        until: int | Sequence[int],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[dict[int, Any]]:
        """The values of all trials at all numbers of steps in `until`; known together, only their forks are saved.

        `progress` is told (stages done, stages in all).
        """
        check_progress(progress)
        rungs = as_rungs(until)
        paths = [self.path(settings, rungs[-1]) for settings in as_trials(trials)]
        tree = self.know(paths, rungs)
        if self.stacks is not None:
            self.stacks.train(tree, progress)
        order = [] if self.stacks is not None else list(tree.ordered())
        for done, stage in enumerate(order):
            if progress is not None:
                progress(done, len(order))
            self.execute(stage)
        return [dict(self.values(number, path, rungs)) for number, path in enumerate(paths)]

    def load(self, settings: Trial, steps: int) -> None:
        """Bring the model, the optimizer and the generators to a point, and leave them there."""
        check_numbers(steps=steps)
        steps = int(steps)
        path = self.path(settings, steps)
        with self.session(keep_generators=False):
            self._advance(path, steps, (steps,), -1)
            self._go(path, steps, -1)
            self.applied.apply(dict(path.settings(steps - 1)))

    def reset(self) -> None:
        """Bring the model, the optimizer and the generators to where they were when this object was created."""
        with self.session(keep_generators=False):
            self.applied.apply({})
            self.training.restore(self._start)

    def plan(self, trials: Iterable[Trial], until: int | Sequence[int]) -> Plan:
        """What these trials, a list of settings, have in common, before anything runs."""
        rungs = as_rungs(until)
        return Plan.of(self.root, [self.path(settings, rungs[-1]) for settings in as_trials(trials)], rungs)

    def report(self) -> Report:
        """What was asked for, what was trained and by whom; with a storage, by all studies and processes on it."""
        values = functools.partial(self.store.value, evaluation=self.evaluation)
        return Report.of(self.tree, self.store.records(), self.store.worker, len(self.store.unsaved), values)

    def trainable(self, config: dict[str, Any]) -> None:
        """A trial of Ray Tune: `ray.tune.Tuner(stages.trainable, param_space={"until": (10, 40), "lr": ...})`.

        `config` is the settings, and `until`. After each of these numbers of steps Ray is told `steps` and what
        `evaluate` returned: a dictionary as it is, a number as `value`. A trial that takes over another one's
        checkpoint, as in population-based training, goes on from that point with its own settings.
        Raises `Invalid` without a storage, which the processes share.
        """
        train(self, config)

    def __reduce__(self) -> Any:
        return rebuilt, (type(self), Recipe.of(self))

    # ---- for a pool of processes, and for stages that are trained together -------------------------------------------
    def path(self, settings: Trial, end: int) -> Path:
        """The path of a trial. Raises `Invalid` for a setting that nothing takes."""
        self.applied.check(settings)
        return Path(self.root, settings, end)

    def know(self, paths: Sequence[Path], rungs: Sequence[int]) -> Tree:
        """The tree of trials; from now on, of these paths only forks and rungs are saved."""
        tree = merged(self.root, [(path, rungs) for path in paths])
        for step, key in tree.forks():
            self._forks.setdefault(step, set()).add(key)
        self._planned |= {path.key(path.end) for path in paths}
        return tree

    def execute(self, stage: Stage) -> None:
        """Train a stage of a tree, and what it starts from if that is missing; evaluate where trials end."""
        trial = self.first_trial(stage)
        with self.session():
            self._advance(stage.path, stage.end, (stage.end,), trial, exact=True)
            if stage.trials:
                self._value(stage.path, stage.end, trial)

    def is_done(self, stage: Stage) -> bool:
        """Whether the end of a stage has a checkpoint, and its value where trials end."""
        point = stage.end, stage.key
        if not self.store.has(point):
            return False
        return not stage.trials or self.evaluate is None or self.store.value(point, self.evaluation)[0]

    def first_trial(self, stage: Stage) -> int:
        """The lowest number of a trial that a stage is part of."""
        return min(_below(stage), default=-1)

    def state(self, path: Path, step: int, number: int) -> State:
        """The state at a point; what is missing on the way is trained."""
        point = step, path.key(step)
        found = self._state(point, number)
        if found is None:
            self._go(path, step, number)
            found = self.training.snapshot()
        self._live = None  # the caller moves the model
        return found

    def values(self, number: int, path: Path, rungs: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """As `run`."""
        for position, rung in enumerate(rungs):
            with self.session():
                self._note_changes(path)
                self.tree.add(number, path, rungs[: position + 1])
                known, value = self._known(path, rung)
                if not known:
                    self._advance(path, rung, rungs, number)
                    value = self._value(path, rung, number)
            steps = rung - (rungs[position - 1] if position else 0)
            point = path.key(rung)  # a later study on this object numbers its trials from 0, too
            self.store.record(run=self.name_of_run, trial=number, until=rung, point=point, requested=steps)
            yield rung, value

    def _known(self, path: Path, step: int) -> tuple[bool, Any]:
        point = step, path.key(step)
        return (self.store.has(point), None) if self.evaluate is None else self.store.value(point, self.evaluation)

    @contextlib.contextmanager
    def session(self, keep_generators: bool = True) -> Iterator[None]:
        """One call at a time; what the caller does to the model afterwards is not trusted to leave it where it is.

        The caller draws from the generators: a search that chooses by chance goes on with its own numbers.
        """
        with self._lock:
            if torch.get_num_threads() != self._threads:
                what = f"PyTorch has {torch.get_num_threads()} threads, the trials were started with {self._threads}"
                raise Invalid(what, advice="sums depend on it: call torch.set_num_threads before Stages(...)")
            for each in self.watched.values():
                each.begin()
            share_choices(self.step, self.store.choices)
            self._live, before = None, generators() if keep_generators else None
            try:
                with fixed(self.step):
                    yield
            finally:
                self._live = None
                for each in self.watched.values():
                    each.end()
                if before is not None:
                    restore_generators(before)

    def _points(self, path: Path, start: int, end: int, rungs: Sequence[int], exact: bool) -> list[int]:
        """The steps after `start` at which to save, the last of them `end`."""
        points = {end, *(rung for rung in rungs if start < rung < end)}
        planned = exact or path.key(path.end) in self._planned
        if not planned:
            points |= {step for step in self._changes if start < step < end}
        elif not exact:
            points |= {step for step, keys in self._forks.items() if start < step < end and path.key(step) in keys}
        return sorted(points)

    def _note_changes(self, path: Path) -> None:
        for segment in path.segments[:-1]:
            if segment.end - segment.start >= self.spacing and len(self._changes) < MOST_CHANGES:
                self._changes.add(segment.end)

    def _nearest(self, path: Path, end: int) -> int:
        """The last step up to `end` at which this path has a checkpoint."""
        live = 0 if self._live is None or not _is_on(path, self._live, end) else self._live[0]
        last = self._last[0][0] if _is_on(path, self._last[0], end) else 0
        for step in self.store.steps():
            if step <= max(live, last):
                break
            if step <= end and self.store.has((step, path.key(step))):
                return step
        return max(live, last)

    def _advance(self, path: Path, end: int, rungs: Sequence[int], number: int, exact: bool = False) -> None:
        """Train towards the point after `end` steps, stage by stage, until it has a checkpoint."""
        start = self._nearest(path, end)
        for stop in self._points(path, start, end, rungs, exact) if start < end else ():
            self._stage(path, start, stop, number)
            start = stop

    def _stage(self, path: Path, start: int, stop: int, number: int) -> None:
        point = stop, path.key(stop)
        with self.store.lock(point):
            if self.store.has(point):  # another process was faster
                return
            self._go(path, start, number)
            at, began = time.time(), time.perf_counter()
            self._train(path, start, stop, number)
            seconds = time.perf_counter() - began
            state = self.training.snapshot()
            with noted(lambda: f"in steps {start} to {stop} {of_trial(number)}"):
                self.training.attributes.check()  # one that was not there before this stage
            self._live = point
            self._last = point, state
            self.store.save(point, state, number)
            entry = {"trial": number, "start": start, "end": stop, "before": path.key(start), "key": point[1]}
            self.store.record(**entry, at=at, seconds=seconds, settings=path.settings(start))

    def _train(self, path: Path, start: int, stop: int, number: int) -> None:
        self._live = None
        for segment in path.between(start, stop):
            self._train_equal(segment, number, segment.start == start)
        if self._settled:
            return
        self._settled, before = True, self._state((start, path.key(start)), number)
        attributes = self.training.snapshot()["attributes"]
        if before is None or is_settled(self.step, before["attributes"], attributes):
            return
        self.training.restore(before)
        self.applied.apply(dict(path.settings(start)))
        arguments = self.data(start, dict(path.settings(start)))
        settle(self.step, tuple(arguments) if isinstance(arguments, tuple | list) else (arguments,))
        self.training.restore(before)
        self._train(path, start, stop, number)

    def _train_equal(self, segment: Segment, number: int, first: bool) -> None:
        """Train steps of equal settings; `first`: a stage begins with them."""
        settings, step = dict(segment.settings), segment.start
        with noted(lambda: f"in step {step} {of_trial(number)}, with {said(segment.settings)}"):
            self.applied.apply(settings)
            self.watched["data"].check()
            self.watched["data"].ask_twice(step, settings)
            self.training.attributes.begin(first)
            for step in range(segment.start, segment.end):
                arguments = self.data(step, dict(settings))
                self.step(*arguments) if isinstance(arguments, tuple | list) else self.step(arguments)
            self.training.attributes.check()
            self.applied.check_kept()

    def _go(self, path: Path, step: int, number: int) -> None:
        """Bring training to a point that has a checkpoint; one that cannot be read is trained."""
        point = step, path.key(step)
        if self._live == point:
            return
        state = self._state(point, number)
        if state is None:
            self._advance(path, step, (), number, exact=True)
            if self._live == point:
                return
            state = self._state(point, number)
            assert state is not None
        self._live = None
        self.training.restore(state)
        self._live = point

    def _state(self, point: Point, number: int) -> State | None:
        if point[0] == 0:
            return self._start
        return self._last[1] if self._last[0] == point else self.store.load(point, number)

    def _value(self, path: Path, step: int, number: int) -> Any:
        """The value of a point, of which training was brought to a checkpoint."""
        known, value = self._known(path, step)
        if known or self.evaluate is None:
            return value
        self._go(path, step, number)
        point = step, path.key(step)
        state = self._state(point, number) or self.training.snapshot()
        with noted(lambda: f"before the evaluation of trial {number} after {step} steps"):
            self.applied.apply(dict(path.settings(step - 1)))
            if self.applied.function is not None and (moved := self.training.moved(state)):
                advice = "apply sets what steps leave as it is: what they train belongs to the state of a trial"
                raise Invalid(f"apply changed {moved}", advice=advice)
        try:
            with noted(lambda: f"in the evaluation of trial {number} after {step} steps"):
                self.watched["evaluate"].check()
                value = as_values(self.evaluate(self.step.model))
        finally:
            self._live = None
            restore_generators(state["generators"])
            self.training.restore_attributes(state)
        if moved := self.training.moved(state):
            advice = "evaluate in model.eval(), without training, and leave parameters and buffers as they are"
            raise Invalid(f"the evaluation of trial {number} after {step} steps changed {moved}", advice=advice)
        self._live = point
        self.store.keep_value(point, self.evaluation, value)
        return value


def _is_on(path: Path, point: Point, end: int) -> bool:
    return point[0] <= end and path.key(point[0]) == point[1]


def _below(stage: Stage) -> Iterator[int]:
    todo = [stage]
    while todo:
        now = todo.pop()
        yield from now.trials
        todo += now.children


__all__ = ["Stages", "Trial"]
