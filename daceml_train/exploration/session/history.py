"""History: the states of a session and the steps between them; a failure changes nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

from daceml_train.analysis.chunks import mended
from daceml_train.analysis.verify import verify as verify_structure
from daceml_train.driver.settings import Settings
from daceml_train.errors import DacemlError, Invalid, Refused, message_of
from daceml_train.exploration.session.listing import every_pass, listed, quick_first
from daceml_train.exploration.session.state import State
from daceml_train.exploration.session.steps import Match, Preview, Step
from daceml_train.exploration.session.subject import Subject
from daceml_train.graph.graph import Graph
from daceml_train.passes import notation
from daceml_train.passes.base import LEVELS, Pass, applied, check_signature, named
from daceml_train.passes.options import check_names
from daceml_train.passes.pipeline import Pipeline
from daceml_train.passes.registry import find
from daceml_train.transformations.at_place import AtPlace

Result = TypeVar("Result")
Applicable = Match | Pass | type[Pass] | Pipeline | str
"""What can be applied; a string is a pass's name or its text, such as `fuse_elementwise(limit=8)`."""


def alone(method: Callable[..., Result]) -> Callable[..., Result]:
    """One call at a time: a widget's clicks may come from several threads."""

    @wraps(method)
    def run(self: History, *arguments: Any, **options: Any) -> Result:
        with self._lock:
            return method(self, *arguments, **options)

    return run


class History:
    """The graphs of a subject, the steps between them, and the session's position among them."""

    def __init__(self, subject: Subject, options: Settings) -> None:
        self.subject, self.options = subject, options
        captured = self.subject.captured
        self._states = [State(captured, self.subject.training_graph(captured))]
        self._steps: list[Step] = []
        self._at = 0
        self._lock = threading.RLock()
        self.version = 0
        """Changes with every change of the graph."""
        self.failing: dict[str, str] = {}
        """Passes that raised while listing matches, and their messages."""

    # ---- reading ------------------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        """The present graphs, with their traffic and memory."""
        return self._states[self._at]

    @property
    def start(self) -> State:
        """The graphs before any step."""
        return self._states[0]

    @property
    def graph(self) -> Graph:
        """The present training graph."""
        return self.state.graph

    @property
    def history(self) -> tuple[Step, ...]:
        """The applied steps."""
        return tuple(self._steps[: self._at])

    @property
    def undone(self) -> tuple[Step, ...]:
        """The undone steps, which `redo` reapplies, in order."""
        return tuple(self._steps[self._at :])

    @alone
    def matches(
        self,
        selection: Collection[str] | None = None,
        pass_: Pass | type[Pass] | str | None = None,
        module_path: str | None = None,
        *,
        refused: bool = False,
    ) -> list[Match]:
        """Places where passes apply, those that save the most bytes first.

        `selection`: places that involve one of these arrays. `pass_`: places of one pass, by object, class, name or
        text; by default of all. `module_path`: places in this user module and below. With `refused`, refused places
        follow, with the reason in `refusal`. On large graphs, bytes that are known only after a pass is applied are
        None, and these places come last: use `preview`.
        """
        if module_path is not None and not isinstance(module_path, str):
            raise Invalid(f"module_path is the path of a module as a text, given {module_path!r}")
        if selection is not None and (
            isinstance(selection, str)
            or not isinstance(selection, Collection)
            or not all(isinstance(name, str) for name in selection)
        ):
            raise Invalid(f"selection is a collection of names of arrays, given {selection!r}", advice="pass a list")
        if pass_ is not None:
            passes = [self._pass(pass_)]
        else:
            passes = self._open_passes()
        found, self.failing = listed(passes, self.state, self._at, selection, module_path, refused)
        if pass_ is not None and self.failing:
            raise Refused(f"{passes[0]} fails: {self.failing[passes[0].name]}")
        return found

    def matches_by_pass(self, *, refused: bool = False) -> Iterator[list[Match]]:
        """The same as `matches`, pass by pass, those first whose search is quick. Ends where the graph changes."""
        state, self.failing = self.state, {}
        for transformation in quick_first(self._open_passes()):
            with self._lock:
                if self.state is not state:
                    return
                found, failing = listed([transformation], state, self._at, None, None, refused)
                self.failing |= failing
            yield found

    def _open_passes(self) -> list[Pass]:
        """Passes that can still apply; those of level `forward` say why not when they are requested by name."""
        return [p for p in every_pass() if not (p.level == "forward" and self.state.differentiated)]

    # ---- previews -----------------------------------------------------------------------------------------------
    @alone
    def preview(self, match: Applicable, **options: Any) -> Preview:
        """What `apply` would do, without changing the session. Where it would raise, a `Preview` has the `reason`."""
        place = match if isinstance(match, Match) else None
        transformation = place.transformation if place is not None else None
        try:
            if isinstance(match, Pipeline):
                raise Invalid("a preview is of a match or a pass, given a pipeline", advice="apply it, and undo it")
            if transformation is None:  # options may be what fails
                transformation = self._pass(match)
            target = self._target(match, options)
            transformation = target.transformation if isinstance(target, Match) else target
            after = self._after(target, transformation.level)
        except Exception as error:
            shown = transformation if transformation is not None else AtPlace()
            return Preview(place, shown, self.state, None, message_of(error))
        return Preview(target if isinstance(target, Match) else None, transformation, self.state, after)

    # ---- changes ------------------------------------------------------------------------------------------------
    @alone
    def apply(self, match: Applicable, **options: Any) -> Step:
        """Apply one match, a pass everywhere, or a pipeline, whose passes become a step each; return the last step.

        `options` override the options of the match's pass. Undone steps are dropped. Raises `Refused` where it is not
        legal or changes nothing, `Invalid` for a match found before another change; nothing is then changed.
        """
        if isinstance(match, Pipeline):
            if options:
                raise Invalid("options belong to one pass", advice="use pipeline.with_options")
            return self._apply_pipeline(match)
        target = self._target(match, options)
        transformation = target.transformation if isinstance(target, Match) else target
        step = self._step(target, transformation.level)
        if not step.matches:
            raise Refused(f"{transformation} changes nothing{self._why(transformation)}")
        self._push([step])
        return step

    def _apply_pipeline(self, pipeline: Pipeline) -> Step:
        """All passes of a pipeline, also those that change nothing, so that it is kept as the user wrote it."""
        if not len(pipeline):
            raise Invalid("the pipeline has no pass")
        state, results = self.state, list[Step]()
        for level, passes in pipeline.passes:
            for transformation in passes:
                step = self._step(transformation, level, state, self._at + len(results))
                results.append(step)
                state = step.after
        self._push(results)
        return results[-1]

    @alone
    def undo(self) -> Step:
        """Undo the last step."""
        if not self._at:
            raise Invalid("there is nothing to undo")
        self._move(self._at - 1)
        return self._steps[self._at]

    @alone
    def redo(self) -> Step:
        """Reapply the step that was undone last."""
        if self._at == len(self._steps):
            raise Invalid("there is nothing to redo")
        self._move(self._at + 1)
        return self._steps[self._at - 1]

    @alone
    def jump(self, number: int) -> None:
        """Go to the state after step `number`, undone steps included; 0 is the start."""
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= len(self._steps):
            raise Invalid(f"there is no step {number!r}", advice=f"steps are 0 (the start) to {len(self._steps)}")
        if number != self._at:
            self._move(number)

    def _move(self, number: int) -> None:
        self._at = number
        self.version += 1

    def _push(self, steps: Sequence[Step]) -> None:
        """Append steps whose states are complete; nothing fails from here on."""
        del self._steps[self._at :], self._states[self._at + 1 :]
        self._steps += steps
        self._states += [step.after for step in steps]
        self._move(len(self._steps))

    # ---- applying a pass ----------------------------------------------------------------------------------------
    def _target(self, given: Applicable, options: dict[str, Any]) -> Match | Pass:
        """The requested match or pass, with changed options."""
        if not isinstance(given, Match):
            transformation = self._pass(given)
            check_names(transformation.name, type(transformation), options)
            return dataclasses.replace(transformation, **options) if options else transformation
        if given.state is not self.state:
            raise Invalid(
                f"the match {given.name} at {given.where} is out of date: {self._since(given)}",
                advice="call matches() again",
            )
        if not options:
            return given
        check_names(given.name, type(given.transformation), options)
        changed = dataclasses.replace(given.transformation, **options)
        for candidate in self.state.matches(changed):
            if (candidate.where, candidate.arrays) == (given.where, given.arrays):
                return Match(candidate, self.state, self._at)
        raise Refused(f"{changed} has no match at {given.where}")

    def _since(self, match: Match) -> str:
        """What happened after a match was found."""
        if not any(state is match.state for state in self._states):
            return f"it belongs to a graph of {match.steps} steps that is no longer in the history"
        later = self._steps[match.steps : self._at]
        if later:
            names = ", ".join(f"step {s.number} ({s.name}{f' at {s.where}' if s.where else ''})" for s in later[:3])
            return f"since it was found, {names}{' and more' if len(later) > 3 else ''} changed the graph"
        return f"it was found after step {match.steps}, and the session is now at step {self._at}"

    def _pass(self, given: Any) -> Pass:
        """The pass given as an object, a class, a name or a text."""
        if isinstance(given, Pass):
            return given
        if isinstance(given, type) and issubclass(given, Pass):
            return given()
        if isinstance(given, str):
            return notation.parse_pass(given) if "(" in given else find(given)()
        raise Invalid(f"expected a match, a pass or its name, given {type(given).__name__}")

    def _after(self, target: Match | Pass, level: str, state: State | None = None) -> State:
        """The verified state after a match or a pass. Raises what makes it impossible."""
        state = self.state if state is None else state
        if level == "forward" and state.differentiated:
            raise Refused(
                f"{target.name} runs before differentiation, and a later pass was applied already",
                advice="undo that first",
            )
        graph = state.forward if level == "forward" else state.graph
        transformation = target.transformation if isinstance(target, Match) else target
        try:
            if isinstance(target, Match):
                if target.refusal is not None:
                    raise Refused(f"{target.name} at {target.where}: {target.refusal}")
                after = target.candidate.apply()
            else:
                after = target.run(graph)
            if after is graph:
                return state
            with named(transformation):
                check_signature(transformation, graph, after)
                after = mended(after)
                verify_structure(after)
            if level == "forward":
                return state.following(after, self.subject.training_graph(after), False)
        except DacemlError:
            raise
        except Exception as error:
            raise Refused(f"{transformation} raised {type(error).__name__}: {error}") from error
        return state.following(state.forward, after, True)

    def _step(self, target: Match | Pass, level: str, state: State | None = None, number: int | None = None) -> Step:
        state, number = self.state if state is None else state, self._at if number is None else number
        kept: Pass | None = None
        if isinstance(target, AtPlace):
            found = target.find(state.forward if level == "forward" else state.graph)
            if found is None or found.refusal is not None:
                return Step(number + 1, target, target, level, "", 0, 0.0, state, state)
            kept, target = target, Match(found, state, number)
        began = time.perf_counter()
        after = self._after(target, level, state)
        seconds = time.perf_counter() - began
        seen = (state.forward, after.forward) if level == "forward" else (state.graph, after.graph)
        count = applied(*seen)
        if not isinstance(target, Match):
            return Step(number + 1, target, target, level, "", count, seconds, state, after if count else state)
        return Step(
            number + 1,
            target.transformation,
            kept or target.anchored,
            level,
            target.where,
            count,
            seconds,
            state,
            after,
            target.module,
            target.operators,
            target.source,
        )

    def _why(self, transformation: Pass) -> str:
        """The first reason why a pass has no place to apply."""
        if isinstance(transformation, AtPlace):
            seen = self.state.forward if transformation.level == "forward" else self.graph
            return f": {transformation.missing(seen)}"
        reasons = (candidate.refusal for candidate in self.state.matches(transformation))
        found = next((r for r in reasons if r), "")
        return f": {found}" if found else ": it finds no place"

    # ---- the same as a pipeline ---------------------------------------------------------------------------------
    @alone
    def pipeline(self) -> Pipeline:
        """The steps as a pipeline, in their order: no pass has an earlier level than one before it.

        A match that was applied by hand becomes the pass `at_place`, which finds it by module and operators.
        `optimize` compiles the forward and the backward pass separately, and runs the levels from `fusion` on each.
        """
        levels: dict[str, list[Pass]] = {level: [] for level in LEVELS}
        reached = 0
        for step in self.history:
            reached = max(reached, LEVELS.index(step.level))
            levels[LEVELS[reached]].append(step.kept)
        return Pipeline(**{level: tuple(passes) for level, passes in levels.items()})
