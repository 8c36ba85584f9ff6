"""A view as SVG: boxes in layers from top to bottom, each below what it reads. For pages without DaCe's viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from daceml_train.exploration.views.view import Edge, GraphView, caption
from daceml_train.reporting.numbers import bytes_text, counted

HEIGHT, GAP, LAYER, LETTER = 24, 14, 52, 6.4
"""Height of a box, room between two, from layer to layer, and per letter, in pixels."""
LONGEST = 42
SWEEPS = 4


def picture(view: GraphView) -> str:
    """The drawing; colors are the page's, by phase."""
    keys = [*view.boxes, *view.ends]
    text = {key: _short(caption(item)) for key, item in view.boxes.items()} | {
        key: _short(name) for key, name in view.ends.items()
    }
    layers = _ordered(_layers(keys, view.edges), view.edges)
    width = {key: 16 + LETTER * len(text[key]) for key in keys}
    whole = max((sum(width[k] + GAP for k in layer) for layer in layers), default=0) + GAP
    places: dict[str, tuple[float, float]] = {}
    for row, layer in enumerate(layers):
        x = (whole - sum(width[k] + GAP for k in layer) + GAP) / 2
        for key in layer:
            places[key] = (x, 10 + LAYER * row)
            x += width[key] + GAP
    parts = [_curve(edge, places, width) for edge in view.edges]
    for key, (x, y) in places.items():
        kind = view.boxes[key].phase if key in view.boxes else "end"
        title = f"<title>{escape(view.boxes[key].module)}</title>" if key in view.boxes else ""
        round_ = 4 if key in view.boxes else 12
        parts.append(
            f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width[key]:.0f}" height="{HEIGHT}" rx="{round_}">'
            f'{title}</rect><text x="{x + 8:.0f}" y="{y + 16:.0f}">{escape(text[key])}</text>'
        )
    height = 20 + LAYER * len(layers)
    box = f'width="{whole:.0f}" height="{height}" viewBox="0 0 {whole:.0f} {height}"'
    return f'<svg {box} role="img" aria-label="the graph of the step, module by module">{"".join(parts)}</svg>'


def _layers(keys: Sequence[str], edges: Sequence[Edge]) -> list[list[str]]:
    """Each key one layer below the lowest of what it reads; edges that close a cycle of groups do not count."""
    after: dict[str, list[str]] = {key: [] for key in keys}
    waiting = dict.fromkeys(keys, 0)
    for edge in edges:
        after[edge.source].append(edge.target)
        waiting[edge.target] += 1
    depth = dict.fromkeys(keys, 0)
    ready, left = [key for key in keys if not waiting[key]], dict.fromkeys(keys)
    while left:
        if not ready:  # groups that read each other: the first in the order of the step goes on top
            ready.append(next(iter(left)))
        key = ready.pop(0)
        if key not in left:
            continue
        del left[key]
        for below in after[key]:
            if below in left:
                depth[below] = max(depth[below], depth[key] + 1)
                waiting[below] -= 1
                if not waiting[below]:
                    ready.append(below)
    layers: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for key in keys:
        layers[depth[key]].append(key)
    return layers


def _ordered(layers: list[list[str]], edges: Sequence[Edge]) -> list[list[str]]:
    """Each layer sorted by the mean position of the neighbors, so that few edges cross."""
    around: dict[str, list[str]] = {}
    for edge in edges:
        around.setdefault(edge.source, []).append(edge.target)
        around.setdefault(edge.target, []).append(edge.source)
    for _ in range(SWEEPS):
        place = {k: i - len(layer) / 2 for layer in layers for i, k in enumerate(layer)}
        layers = [sorted(layer, key=lambda k: _mean(around.get(k, ()), place, place[k])) for layer in layers]
    return layers


def _mean(names: Sequence[str], place: Mapping[str, float], otherwise: float) -> float:
    return sum(place[n] for n in names) / len(names) if names else otherwise


def _curve(edge: Edge, places: Mapping[str, tuple[float, float]], width: Mapping[str, float]) -> str:
    x0, y0 = places[edge.source][0] + width[edge.source] / 2, places[edge.source][1] + HEIGHT
    x1, y1 = places[edge.target][0] + width[edge.target] / 2, places[edge.target][1]
    long = round((y1 - y0) / LAYER) > 1 or y1 < y0
    bend, aside = max(16.0, abs(y1 - y0) / 2), 0.35 * abs(y1 - y0) + 40 if long else 0.0  # round the boxes between
    path = f"M{x0:.0f} {y0:.0f}C{x0 + aside:.0f} {y0 + bend:.0f} {x1 + aside:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    told = f"{bytes_text(edge.bytes)}, {counted(len(edge.arrays), 'array')}"
    return f'<path d="{path}"><title>{escape(told)}</title></path>'


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
