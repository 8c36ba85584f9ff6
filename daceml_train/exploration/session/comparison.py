"""Comparison: two sessions, or two pipelines on one session's model, side by side."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.memory import number
from daceml_train.exploration.session.measurement import Measurement
from daceml_train.exploration.session.state import State, Totals


@dataclass(frozen=True)
class Comparison:
    """`totals` of both; `steps` that only one has, with `-` or `+`; bytes per user module; times if measured."""

    names: tuple[str, str]
    totals: tuple[Totals, Totals]
    steps: tuple[str, ...]
    modules: Mapping[str, tuple[int, int]]
    """Module -> bytes in both, where they differ, the largest difference first."""
    times: Measurement | None = None

    @property
    def same(self) -> bool:
        """Whether both are the same: equal costs in every module, by equal steps."""
        return self.totals[0] == self.totals[1] and not self.modules and not self.steps

    def as_dict(self) -> dict[str, Any]:
        """The numbers as plain data."""
        fields = ("bytes", "peak", "flops", "operators", "kernels", "calls")
        data: dict[str, Any] = {f: [getattr(t, f) for t in self.totals] for f in fields}
        data |= {"same": self.same, "names": list(self.names), "steps": list(self.steps), "modules": dict(self.modules)}
        if self.times is not None:
            data["seconds"] = [self.times[name].median for name in self.names]
        return data

    def __str__(self) -> str:
        a, b = self.totals
        width = max(12, *(len(name) for name in self.names))
        lines = [f"{'':10} {self.names[0]:>{width}} {self.names[1]:>{width}}"]
        for name in ("bytes", "peak", "flops", "operators", "kernels", "calls"):
            before, after = getattr(a, name), getattr(b, name)
            share = f"  {100 * (after - before) / before:+.1f} %" if before and after != before else ""
            lines.append(f"{name:10} {before:>{width},} {after:>{width},}{share}")
        if self.times is not None:
            times = [f"{1e6 * self.times[name].median:,.1f} us" for name in self.names]
            ratio = self.times.faster(self.names[1], self.names[0])
            speedup = "within the spread" if ratio is None else f"{ratio:.2f} times as fast"
            lines.append(f"{'time':10} {times[0]:>{width}} {times[1]:>{width}}  {speedup}")
        if self.modules:
            lines.append("bytes per module, where they differ:")
            shown = list(self.modules.items())
            lines += [f"  {m or '(no module)':30} {x:>15,} {y:>15,}  {y - x:+,}" for m, (x, y) in shown[:12]]
            lines += [f"  and {len(shown) - 12} more"] if len(shown) > 12 else []
        if self.steps:
            lines += ["steps:", *(f"  {step}" for step in self.steps)]
        return "\n".join(lines)


def compared(
    names: tuple[str, str], states: tuple[State, State], steps: tuple[list[str], list[str]], times: Measurement | None
) -> Comparison:
    """The differences of two states, and of the steps that led there."""
    lines = difflib.unified_diff(*steps, lineterm="", n=0)
    changed = tuple(line for line in lines if not line.startswith(("---", "+++", "@@")))
    by_module = [state.traffic.by_module() for state in states]
    paths = dict.fromkeys([*by_module[0], *by_module[1]])
    pairs = {p: (number(by_module[0].get(p, 0)), number(by_module[1].get(p, 0))) for p in paths}
    differing = sorted(((p, x) for p, x in pairs.items() if x[0] != x[1]), key=lambda e: -abs(e[1][1] - e[1][0]))
    return Comparison(names, (states[0].totals, states[1].totals), changed, dict(differing), times)
