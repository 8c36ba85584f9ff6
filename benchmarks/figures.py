"""The demonstration's figures: loss curves of both ways of training, and the bytes that a step moves per level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")  # draws to files, without a display
from matplotlib import pyplot

if TYPE_CHECKING:
    from benchmarks.demo import Training

BLUE, ORANGE, GREY, INK = "#0072B2", "#E69F00", "#C8CDD2", "#22272B"
"""From Okabe & Ito, Color Universal Design (2008): distinguishable with every kind of color vision."""
STYLE = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8A9299",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": "#555C63",
    "ytick.color": "#555C63",
    "figure.dpi": 150,
    "legend.frameon": False,
}


def losses(training: Training, folder: Path) -> Path:
    """Both loss curves over each other, and below them by how much they differ."""
    with pyplot.rc_context(STYLE):
        figure, (top, bottom) = pyplot.subplots(
            2, 1, figsize=(7.5, 5.6), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        steps = range(1, len(training.eager.losses) + 1)
        ratio = training.eager.milliseconds / training.ours.milliseconds
        eager = f"{training.eager.title}, {training.eager.milliseconds:.1f} ms a step"
        ours = f"{training.ours.title}, {training.ours.milliseconds:.1f} ms a step ({ratio:.2f} x as fast)"
        top.plot(steps, training.eager.losses, color=ORANGE, linewidth=4.5, alpha=0.75, label=eager)
        top.plot(steps, training.ours.losses, color=BLUE, linewidth=1.3, label=ours)
        top.set_title(f"{training.title}: training loss, the same batches from the same start")
        top.set_ylabel("cross-entropy (nats)")
        if min(training.eager.losses) < 0.2 * max(training.eager.losses):
            top.set_yscale("log")
        top.legend(loc="upper right")
        differences = [abs(a - b) for a, b in zip(training.eager.losses, training.ours.losses, strict=True)]
        bottom.semilogy(steps, [max(d, 1e-8) for d in differences], ".", color=INK, markersize=3)
        bottom.set(xlabel="training step", ylabel="|difference|")
        for axes in (top, bottom):
            axes.grid(axis="y", color="#E6E9EC", linewidth=0.8)
            axes.set_axisbelow(True)
        bottom.set_xlim(1, len(differences))
        return _saved(figure, folder / f"{training.title.lower()}_loss.png")


def bytes_per_level(trainings: Sequence[Training], folder: Path) -> Path:
    """A bar per level: the bytes that a training step moves after it."""
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            1, len(trainings), figsize=(5.4 * len(trainings), 3.4), layout="constrained", squeeze=False
        )
        for axes, training in zip(panels[0], trainings, strict=True):
            _bars(axes, training)
        figure.suptitle("Memory traffic of one training step, by level", x=0.01, ha="left", weight="bold", size=14)
        return _saved(figure, folder / "bytes_per_level.png")


def _bars(axes: Any, training: Training) -> None:
    moved = training.moved
    names = ["as captured", *(f"after {level.name.replace('_', ' ')}" for level in moved.levels)]
    sizes = [float(size) / 1e6 for size in (moved.captured, *(level.after for level in moved.levels))]
    colors = [GREY] + [BLUE] * (len(sizes) - 1)
    bars = axes.barh(names, sizes, color=colors, height=0.66)
    labels = [f"{size:.0f} MB" if size >= 10 else f"{size:.1f} MB" for size in sizes]
    saved = ["", *(f"  (−{100 * (1 - size / sizes[0]):.0f} %)" for size in sizes[1:])]
    labels = [label + share for label, share in zip(labels, saved, strict=True)]
    axes.bar_label(bars, labels, padding=5, color=INK, size=10)
    axes.invert_yaxis()
    axes.set(title=training.title, xlabel="megabytes read and written", xlim=(0, 1.42 * max(sizes)))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E6E9EC", linewidth=0.8)
    axes.set_axisbelow(True)


def ratios(networks: Mapping[str, Mapping[str, float]], path: Path, machine: str) -> Path:
    """Up to three bars per network: how many times as fast as the best of PyTorch a step is."""
    kinds = {"step": "training_step", "tuned": "training_step, PyTorch's memory tuned", "module": "optimize"}
    kinds = {kind: label for kind, label in kinds.items() if any(kind in row for row in networks.values())}
    colors = {"step": BLUE, "tuned": "#56B4E9", "module": ORANGE}
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8.0, 0.9 + 0.52 * len(networks)), layout="constrained")
        for place, (kind, label) in enumerate(kinds.items()):
            heights = [row.get(kind, 0.0) for row in networks.values()]
            thick = 0.81 / max(2, len(kinds))
            at = [number + thick * (place - (len(kinds) - 1) / 2) for number in range(len(networks))]
            bars = axes.barh(at, heights, height=0.93 * thick, color=colors[kind], label=label)
            axes.bar_label(bars, [f"{h:.2f}" if h else "" for h in heights], padding=3, color=INK, size=8)
        axes.axvline(1.0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(networks)), networks)
        axes.set(title=f"Training steps: times as fast as the best of PyTorch\n{machine}", xlim=(0, None))
        axes.set_ylim(len(networks) - 0.5, -0.5)
        axes.margins(x=0.08)
        figure.legend(loc="outside lower center", ncols=len(kinds), fontsize=9)
        axes.grid(axis="x", color="#E6E9EC", linewidth=0.8)
        axes.set_axisbelow(True)
        return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    pyplot.close(figure)
    return path
