"""Pictures of a report as SVG: bytes by level, the roofline, memory over the step. Colors are the page's variables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from daceml_train.reporting.model import Compiled, Eager, Group
from daceml_train.reporting.numbers import bytes_text, flops_text, seconds_text
from daceml_train.runtime.roofline import Machine

WIDTH = 720
POINTS = 300
"""The maximum number of points of a curve."""
DECADES = 6.0
"""The maximum number of powers of ten in a roofline; slower kernels are at its lower edge."""


def bars(function: Compiled, eager: Eager | None) -> str:
    """A bar per level, below PyTorch's bytes if they are known."""
    rows: list[tuple[str, int | str, str]] = [("PyTorch eager", eager.bytes, "before")] if eager is not None else []
    rows.append(("one kernel or call per operator", function.captured, "before"))
    rows += [(f"after {level.name.replace('_', ' ')}", level.after, "after") for level in function.levels]
    known = [(name, size, kind) for name, size, kind in rows if isinstance(size, int)]
    largest = max((size for _, size, _ in known), default=0) or 1
    height, parts = 26 * len(known), []
    for place, (name, size, kind) in enumerate(known):
        y, width = 26 * place, max(1.0, 360 * size / largest)
        parts.append(f'<text x="200" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        told = f"{name}: {size:,} bytes"
        told += f", {size / eager.bytes:.2f} of PyTorch's" if eager is not None and eager.bytes else ""
        bar = f'<rect class="{kind}" x="210" y="{y + 5}" width="{width:.1f}" height="16" rx="2">'
        parts.append(f"{bar}<title>{escape(told)}</title></rect>")
        parts.append(f'<text class="number" x="{218 + width:.1f}" y="{y + 17}">{bytes_text(size)}</text>')
    return svg(height, parts, "Bytes by level")


def roofline(groups: Sequence[Group], machine: Machine, count: int = 80) -> str:
    """Measured kernels under the machine's roof: operations per byte against operations per second, both logarithmic.

    The area of a point is its share of the time. Kernels that do no arithmetic are at the left edge.
    """
    shown = [g for g in groups if g.seconds and g.bytes][:count]
    if not shown:
        return ""
    total = sum(g.seconds or 0.0 for g in shown)
    points = [(max(g.flops / g.bytes, 2**-6), max(g.flops, g.bytes / 64) / (g.seconds or 1.0), g) for g in shown]
    low = min(-4.0, math.floor(min(math.log2(x) for x, _, _ in points)))
    high = max(math.ceil(math.log2(machine.balance)) + 2.0, math.ceil(max(math.log2(x) for x, _, _ in points)))
    top = math.ceil(math.log10(max(machine.peak, *(y for _, y, _ in points))))
    bottom = min(top - 3.0, math.floor(min(math.log10(y) for _, y, _ in points)))
    bottom = max(bottom, top - DECADES)
    left, right, upper, lower = 64, WIDTH - 20, 16, 300

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = left + (right - left) * (math.log2(intensity) - low) / (high - low)
        y = lower - (lower - upper) * (math.log10(rate) - bottom) / (top - bottom)
        return x, min(max(y, upper), lower)

    parts = [*_grid(low, high, bottom, top, at)]
    corners = [at(2**low, 2**low * machine.bandwidth), at(machine.balance, machine.peak), at(2**high, machine.peak)]
    parts.append(f'<polyline class="roof" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>')
    for intensity, rate, group in sorted(points, key=lambda p: -(p[2].seconds or 0.0)):
        x, y = at(intensity, rate)
        radius = 3 + 16 * math.sqrt((group.seconds or 0.0) / total)
        share = group.roofline(machine) or 0.0
        title = f"{group.name} × {group.count}: {seconds_text(group.seconds or 0.0)}, {bytes_text(group.bytes)}, "
        title += f"{flops_text(group.flops)}, " + (
            "from cache" if share > 1 else f"{100 * share:.0f} % of the roofline"
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{escape(title)}</title></circle>')
    caption = f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.peak / 1e9:.0f} GFLOP/s"
    parts.append(f'<text class="number" x="{right}" y="{upper - 4}" text-anchor="end">{caption}</text>')
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{lower + 34}" text-anchor="middle">operations per byte</text>')
    return svg(lower + 40, parts, "Roofline")


def _grid(low: float, high: float, bottom: float, top: float, at: object) -> Iterator[str]:
    assert callable(at)
    for power in range(int(low), int(high) + 1, 2):
        x, y = at(2.0**power, 10.0**bottom)
        _, above = at(2.0**power, 10.0**top)
        label = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        yield f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{above:.1f}"/>'
        yield f'<text class="number" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{label}</text>'
    for power in range(int(bottom), int(top) + 1):
        x, y = at(2.0**low, 10.0**power)
        right, _ = at(2.0**high, 10.0**power)
        label = f"{10 ** (power - 9):g} GF/s"
        yield f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="number" x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def memory(function: Compiled) -> str:
    """Bytes alive over the launches of a step, above those of the inputs."""
    sizes = function.memory
    if not sizes:
        return ""
    stride = max(1, -(-len(sizes) // POINTS))
    peaks = [max(sizes[i : i + stride]) for i in range(0, len(sizes), stride)]
    largest, left, right, upper, lower = function.peak or 1, 80, WIDTH - 20, 14, 170

    def y(size: float) -> float:
        return lower - (lower - upper) * size / largest

    step = (right - left) / len(peaks)
    points = [f"{left},{lower}"]
    for place, size in enumerate(peaks):
        high = y(function.inputs + size)
        points += [f"{left + place * step:.1f},{high:.1f}", f"{left + (place + 1) * step:.1f},{high:.1f}"]
    points.append(f"{right},{lower}")
    at = peaks.index(max(peaks))
    parts = [f'<polygon class="area" points="{" ".join(points)}"/>']
    base = y(function.inputs)
    parts.append(f'<rect class="base" x="{left}" y="{base:.1f}" width="{right - left}" height="{lower - base:.1f}"/>')
    for size, label in ((function.peak, "peak"), (function.inputs, "inputs")):
        parts.append(f'<line class="grid" x1="{left}" y1="{y(size):.1f}" x2="{right}" y2="{y(size):.1f}"/>')
        parts.append(f'<text class="number" x="{left - 6}" y="{y(size) + 4:.1f}" text-anchor="end">{label}</text>')
    for place, size in enumerate(peaks):
        first, last = place * stride + 1, min((place + 1) * stride, len(sizes))
        told = f"launch {first}" + (f" to {last}" if last > first else "") + f": {bytes_text(function.inputs + size)}"
        strip = f'<rect class="strip" x="{left + place * step:.1f}" y="{upper}" width="{step:.2f}" '
        parts.append(f'{strip}height="{lower - upper}"><title>{told}</title></rect>')
    shown = f'<text class="number" x="{min(left + at * step + 8, right - 90):.0f}" y="{upper - 3}">'
    parts.append(f"{shown}{bytes_text(function.peak)}</text>")
    parts.append(f'<text x="{right}" y="{lower + 18}" text-anchor="end">{len(sizes)} launches, in order</text>')
    return svg(lower + 26, parts, "Memory over the step")


def svg(height: float, parts: Sequence[str], title: str) -> str:
    """A picture of `WIDTH` by `height` units; the parts are SVG."""
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{title}">{inside}</svg>'
