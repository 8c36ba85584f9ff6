"""Session: a model's training graph, transformed one match at a time, without a browser.

    session = dt.Session(model, x)                                # forward and backward pass as one graph
    session = dt.Session(model, x, y, loss=loss)                  # loss and all gradients
    session = dt.Session(model, x, y, loss=loss, optimizer=adam)  # the whole step
    session = dt.Session(model, x, pipeline=dt.TRAINING)          # begin with these passes applied; each is a step

Inputs are those of `training_step` (the first may be a tuple or a dict) or, without loss and optimizer, the module's
own. `clip_norm`, `norm_type`, `clip_value`, `scaler`, `micro_batches` and `reduction` are those of `training_step`;
with micro-batches, the session is about the program of the last part of a batch, and its pipeline serves for all parts.
The session begins with the captured and differentiated graph, before all passes. Nothing is run before
`verify` or `measure`, and the model is never changed.

    session.graph                       the present `Graph`; `session.state` also has its traffic, memory and totals
    session.matches(...)                places where passes apply, the largest savings first (`Match`)
    session.preview(match, limit=8)     what applying would do (`Preview`), perhaps with other options; changes nothing
    session.apply(match)                apply it: a `Step`. Also a pass, its name or text, or a whole pipeline
    session.undo(), session.redo()      one step back, or forward; the `Step`
    session.jump(3)                     go to the state after the third step; 0 is the start
    session.leave_out(3)                undo the third step alone: a `Replay` of the later ones
    session.history, session.undone     the steps applied, and those that `redo` would apply, in order
    session.pipeline()                  the same as a `Pipeline`, for `optimize` and `training_step`
    session.save("mine.json")           write it; also `.txt` and, to read and import, `.py`
    session.replay("mine.json")         apply what was saved: a `Replay` with what did not match, and why
    session.verify()                    compile, run, compare with PyTorch and float64 (`Verification`)
    session.measure(repeats=20)         times of the present graph, start, default pipeline, PyTorch (`Measurement`)
    dt.compare(session, other)          two sessions, or pipelines on one session, side by side (`Comparison`)
    session.version                     a number that changes with every change of the graph

`progress` is called with (kernels done, kernels in all) while `verify` or `measure` compile; both may run in another
thread while the session goes on.

A match is valid in the state in which it was found. Later, `apply` and `preview` refuse it and name the changes in
between. A failure leaves the session unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from daceml_train.driver.micro_batches import Reduction
from daceml_train.driver.options import Options
from daceml_train.driver.settings import Settings
from daceml_train.errors import Invalid, message_of
from daceml_train.exploration.export.page import export_html, session_html
from daceml_train.exploration.session.comparison import Comparison, compared
from daceml_train.exploration.session.history import History, alone
from daceml_train.exploration.session.measurement import Measurement
from daceml_train.exploration.session.measurement import measure as measure_states
from daceml_train.exploration.session.progress import CheckProgress, OnProgress, check_progress, unheard
from daceml_train.exploration.session.saving import write
from daceml_train.exploration.session.state import State
from daceml_train.exploration.session.steps import Step
from daceml_train.exploration.session.subject import GradientSettings, Loss, Subject
from daceml_train.exploration.session.verification import Verification
from daceml_train.exploration.session.verification import verify as verify_graph
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.passes.pipeline import Pipeline
from daceml_train.storage.named_by_user import path_of
from daceml_train.training.gradients import Clipping
from daceml_train.transformations import catalog
from daceml_train.transformations.at_place import AtPlace
from daceml_train.transformations.pipelines import TRAINING


class Session(History):
    """See the module's docstring."""

    def __init__(
        self,
        model: torch.nn.Module,
        *inputs: Any,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        pipeline: Pipeline | str | Path | None = None,
        cache: Path | str | None = None,
        random: Randomness = "seeded",
        progress: Callable[[int, int], None] | None = None,
        micro_batches: int = 1,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        first = Pipeline() if pipeline is None else pipeline
        chosen = Options(first, cache, progress=progress, dynamic=False, random=random).settings()
        catalog.load()
        options = dataclasses.replace(chosen, pipeline=Pipeline())
        treatment = GradientSettings(Clipping(clip_norm, norm_type, clip_value), scaler, micro_batches, reduction)
        super().__init__(Subject.of(model, inputs, loss, optimizer, options, treatment), options)
        if len(chosen.pipeline):
            self.apply(chosen.pipeline)

    # ---- running ------------------------------------------------------------------------------------------------
    def verify(self, progress: OnProgress = unheard) -> Verification:
        """Compile the present graph, run it once on copies, and compare results, all gradients, updates, optimizer
        state and buffers with PyTorch, in float64 where the model allows it. Learning rates are 1 for that.

        The gradients of a whole step, which need not exist as arrays, come from the same steps on the step with its
        gradients as outputs. `progress` is called with `CheckProgress`, among it a first comparison of some tensors.
        """

        def with_gradients(subject: Subject) -> tuple[Graph, list[str]]:
            wider = Session.over(subject, self.options)
            replayed = wider.replay(steps)
            return wider.graph, [
                f"not in the program whose gradients were compared: {p}: {w}" for p, w in replayed.missed
            ]

        check_progress(progress)
        with self._lock:
            steps, graph = self.pipeline(), self.graph
        return verify_graph(self.subject, graph, with_gradients, self.options, progress)

    def measure(
        self, repeats: int = 20, *, default: bool = True, eager: bool = True, progress: OnProgress = unheard
    ) -> Measurement:
        """Run the present graph's program in turn with that of the start, that of the default pipeline, and PyTorch.

        Everything runs on copies; `now`, `start`, `default` and `eager` are their names. `progress` is called with
        `CheckProgress`, among it the times so far.
        """
        check_progress(progress)
        states = {"now": self.state, "start": self.start}
        if default:
            progress(CheckProgress("applying the default pipeline"))
            states["default"] = self.with_pipeline(TRAINING)
        return measure_states(self.subject, states, self.options, eager, repeats, progress)

    def with_pipeline(self, pipeline: Pipeline | str | Path) -> State:
        """The state of a pipeline applied to the start; the session stays as it is."""
        other = Session.over(self.subject, self.options)
        chosen = Pipeline.of(pipeline)
        if len(chosen):
            other.apply(chosen)
        return other.state

    @classmethod
    def over(cls, subject: Subject, options: Settings) -> Session:
        """A session of a captured subject."""
        session = object.__new__(cls)
        History.__init__(session, subject, options)
        return session

    @alone
    def save(self, path: Path | str) -> Path:
        """Write the steps as a pipeline that `replay`, `optimize` and `training_step` read: .json, .txt or .py."""
        before, after = self.start.bytes, self.state.bytes
        about = f"{self.subject.name}: {before:,} -> {after:,} bytes moved"
        return write(path_of(path, "a saved session"), self.pipeline(), self.history, about)

    @alone
    def replay(self, path: Pipeline | Path | str) -> Replay:
        """Apply what was saved, here or on another model, after the present steps.

        Steps that do not match, or fail, are listed with their reasons, and the others are applied; a pass that changes
        nothing is a step without matches, since it may change another model.
        """
        steps = [(level, p) for level, passes in Pipeline.of(path).passes for p in passes]
        results, missed = self._replayed(steps, self._at)
        if results:
            self._push(results)
        return Replay(self, tuple(results), tuple(missed))

    @alone
    def leave_out(self, number: int) -> Replay:
        """Undo step `number` alone: the later ones are replayed without it. Undone steps are dropped."""
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= self._at:
            raise Invalid(f"there is no step {number!r} to leave out", advice=f"{self._at} steps are applied")
        later = [(step.level, step.kept) for step in self._steps[number : self._at]]
        results, missed = self._replayed(later, number - 1)
        self._at = number - 1
        if later:
            self._push(results)
        else:  # as `undo`, so that `redo` has the step
            self._move(self._at)
        return Replay(self, tuple(results), tuple(missed))

    def _replayed(self, steps: Sequence[tuple[str, Pass]], at: int) -> tuple[list[Step], list[tuple[Pass, str]]]:
        """The steps of passes from the state after step `at`, and the passes that do not apply, with the reasons."""
        state, results = self._states[at], list[Step]()
        missed: list[tuple[Pass, str]] = []
        for level, transformation in steps:
            try:
                step = self._step(transformation, level, state, at + len(results))
            except Exception as error:
                missed.append((transformation, message_of(error)))
                continue
            if isinstance(transformation, AtPlace) and not step.matches:
                seen = state.forward if level == "forward" else state.graph
                missed.append((transformation, transformation.missing(seen) or "it changes nothing"))
                continue
            results.append(step)
            state = step.after
        return results, missed

    def export_html(self, path: Path | str) -> Path:
        """Write the session as a page that needs neither kernel nor network."""
        return export_html(self, path)

    def _repr_html_(self) -> str:
        return session_html(self)

    def __str__(self) -> str:
        now, start = self.state, self.start
        lines = [f"session of {self.subject.name}: {len(now.graph.nodes)} operators, {now.bytes:,} bytes moved"]
        if self.history:
            lines[0] += f" ({100 * (1 - now.bytes / start.bytes) if start.bytes else 0:.1f} % saved)"
        lines += [f"  {step}" for step in self.history]
        return "\n".join(lines)


def compare(
    a: Session | Pipeline | str | Path,
    b: Session | Pipeline | str | Path,
    session: Session | None = None,
    *,
    measure: bool = False,
    repeats: int = 20,
) -> Comparison:
    """Two sessions, or pipelines as `session` would run them from its start, side by side; `measure` runs both in turn.

    Sessions that are measured have to be about the same model on the same inputs.
    """
    owner = next((s for s in (a, b, session) if isinstance(s, Session)), None)
    if owner is None:
        raise Invalid("two pipelines are compared on a session's model", advice="pass session=")
    if not isinstance(session, Session | None):
        raise Invalid(f"session is a Session, given {type(session).__name__}")
    states, steps, names = list[State](), list[list[str]](), list[str]()
    for given, name in ((a, "a"), (b, "b")):
        if isinstance(given, Session):
            states.append(given.state)
            steps.append([str(step.kept) for step in given.history])
            names.append(name)
        else:
            pipeline = Pipeline.of(given)
            states.append((session or owner).with_pipeline(pipeline))
            steps.append([str(p) for p in pipeline])
            names.append(Path(given).stem if isinstance(given, Path) else name)
    if names[0] == names[1]:
        names = ["a", "b"]
    times = None
    if measure:
        others = [s for s in (a, b, session) if isinstance(s, Session)]
        if any(other.subject.model is not owner.subject.model for other in others):
            raise Invalid("the sessions have different models: their times say nothing about the steps")
        if any(other.start.graph.inputs != owner.start.graph.inputs for other in others):
            raise Invalid("the sessions have different inputs, losses or optimizers: their times are not of one step")
        both = dict(zip(names, states, strict=True))
        times = measure_states(owner.subject, both, owner.options, False, repeats)
    return compared((names[0], names[1]), (states[0], states[1]), (steps[0], steps[1]), times)


@dataclass(frozen=True)
class Replay:
    """The steps of a saved pipeline that were applied, and those that were not, with the reasons."""

    session: Session
    steps: tuple[Step, ...]
    missed: tuple[tuple[Pass, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.steps)} of {len(self.steps) + len(self.missed)} steps applied", str(self.session)]
        lines += [f"  not applied: {transformation}\n    {reason}" for transformation, reason in self.missed]
        return "\n".join(lines)


def replay(
    path: Pipeline | Path | str,
    model: torch.nn.Module,
    *inputs: Any,
    **options: Any,
) -> Replay:
    """A session of a model with what was saved applied to it; inputs and options are those of `Session`."""
    read = Pipeline.of(path)
    return Session(model, *inputs, **options).replay(read)
