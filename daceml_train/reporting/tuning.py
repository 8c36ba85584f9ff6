"""Tune: measure the schedules of the tiled kernels of a step or a module, and show what was found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.driver.module import state_of
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid
from daceml_train.lowering.device import CPU
from daceml_train.lowering.program import KernelLaunch
from daceml_train.reporting.numbers import counted, seconds_text
from daceml_train.reporting.page import STYLE, whole
from daceml_train.runtime.tune_schedules import Candidate, Nest, explore
from daceml_train.storage.named_by_user import file_of, write_text


@dataclass(frozen=True)
class Explored:
    """The result of `tune`. Printed, it is a table; a notebook shows it as HTML."""

    name: str
    nests: tuple[Nest, ...]

    @property
    def dropped(self) -> list[tuple[str, Candidate]]:
        """The candidates that were wrong, that ended their process, or that could not be compared, by kernel."""
        return [(nest.name, c) for nest in self.nests for c in nest.candidates if c.refusal]

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return dataclasses.asdict(self)

    def save(self, path: Path | str) -> None:
        """Write the result: `.html`, `.json`, or text for any other ending."""
        path = file_of(path, "the result of tune")
        text = str(self) + "\n"
        if path.suffix == ".json":
            text = json.dumps(self.as_dict(), indent=1) + "\n"
        elif path.suffix == ".html":
            text = whole(f"Schedules of {self.name}", self._repr_html_())
        write_text(path, text, "the result of tune")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"schedules of {self.name}: {counted(len(self.nests), 'tiled kernel')}"
        for nest in self.nests:
            yield f"\n{nest.name}: {_gain(nest)}"
            for c in nest.candidates:
                mark = "*" if c is nest.chosen else " "
                yield f" {mark} {c.schedule:<28} {c.cycles:>12,.0f} cycles  {_found(c)}"
        if not self.nests:
            yield "no kernel has a choice of schedules"

    def _repr_html_(self) -> str:
        parts = [f"<h1>Schedules of {escape(self.name)}</h1>"]
        for nest in self.nests:
            slowest = max((c.seconds or 0.0 for c in nest.candidates), default=0.0)
            rows = [
                f"<tr><td>{'<b>' if c is nest.chosen else ''}{escape(c.schedule)}</td><td>{c.cycles:,.0f}</td>"
                f"<td>{escape(_found(c))}</td><td>{_bar(c, slowest)}</td></tr>"
                for c in nest.candidates
            ]
            parts.append(
                f"<h2>{escape(nest.name)}</h2><p>{escape(_gain(nest))}</p><table><tr><th>schedule</th>"
                f"<th>cycles, predicted</th><th>a call</th><th></th></tr>{''.join(rows)}</table>"
            )
        parts += [] if self.nests else ["<p>No kernel has a choice of schedules.</p>"]
        return f'<style>{STYLE}</style><div class="daceml-report">{"".join(parts)}</div>'


def _gain(nest: Nest) -> str:
    default, chosen = nest.candidates[0], nest.chosen
    if default.seconds is None or chosen.seconds is None:
        return "not measured" if chosen.seconds is None else f"{seconds_text(chosen.seconds)}"
    if chosen is default:
        return f"{seconds_text(default.seconds)}, the default is kept"
    ratio = default.seconds / chosen.seconds
    return f"{seconds_text(default.seconds)} -> {seconds_text(chosen.seconds)}, {ratio:.2f} times as fast"


def _found(candidate: Candidate) -> str:
    if candidate.refusal:
        return f"dropped: {candidate.refusal}"
    return "not measured" if candidate.seconds is None else seconds_text(candidate.seconds)


def _bar(candidate: Candidate, slowest: float) -> str:
    if not candidate.seconds or not slowest:
        return ""
    return f'<span class="bar" style="width:{160 * candidate.seconds / slowest:.0f}px"></span>'


def tune(compiled: Any, progress: Callable[[int, int], None] = lambda done, total: None) -> Explored:
    """Measure the schedules of all tiled kernels of what `optimize` or `training_step` returned, after its first call.

    Candidates are compared with their operators in float64 and timed on one thread; `progress` is called with
    (candidates done, candidates in all). The choices are stored in the cache. A training step has them from its next
    call on, a module in the next process that loads it. Raises `Invalid` for other objects, and before the first call.
    """
    if isinstance(compiled, TrainingStep):
        name, settings = type(compiled.model).__name__, compiled.options
        pieces = state_of(compiled.pieces)
        records = [*compiled.records, *(pieces.backend.records if pieces else ())]
    elif (state := state_of(compiled)) is not None:
        name, settings, records = state.source.__name__, state.options, state.backend.records
    else:
        raise Invalid(f"tune takes what `optimize` or `training_step` returned, given {type(compiled).__name__}")
    if not records:
        raise Invalid(f"{name} has no programs yet", advice="call it once, then tune it")
    codes = _nests(records)
    found = explore(list(codes.values()), list(codes), _compiler(settings), settings.cache.schedules, progress)
    if isinstance(compiled, TrainingStep):
        compiled.forget_programs()
    return Explored(name, tuple(found))


def _nests(records: Sequence[Record]) -> dict[str, KernelCode]:
    """The kernels that have a choice of schedules, by what they compute; the last program's code for equal ones."""
    found: dict[str, KernelCode] = {}
    for record in records:
        program = record.executable.program if record.executable is not None else None
        for index, launch in enumerate(program.launches if program else ()):
            if not isinstance(launch, KernelLaunch) or program is None or program.codes[launch.code].nest is None:
                continue
            code = program.codes[launch.code]
            if code.key in {known.key for known in found.values()}:
                continue
            operators = record.costs[index].operators if index < len(record.costs) else "kernel"
            found[f"{record.name} {index}: {operators[:80]}"] = code
    return found


def _compiler(settings: Settings) -> Callable[[Sequence[KernelCode]], Mapping[str, int]]:
    def compile_codes(codes: Sequence[KernelCode]) -> Mapping[str, int]:
        found = CPU.toolchain.addresses(codes, settings.cache.kernels, settings.jobs, None)
        return {key: address for key, (address, _) in found.items()}

    return compile_codes


__all__ = ["Explored", "tune"]
