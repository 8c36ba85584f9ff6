"""Ray Tune: trials of `ray.tune.Tuner(stages.trainable, ...)`, each in a process of Ray, on one storage.

What Ray keeps as a checkpoint is not the weights, which are in the storage of stages, but the settings so far. A trial
that starts from another one's checkpoint is a fork at that point: its first steps are trained already.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path as Folder
from typing import Any, Protocol

from daceml_train.errors import Invalid
from daceml_train.trials.checks import as_rungs
from daceml_train.trials.keys import Path
from daceml_train.trials.schedules import piecewise

UNTIL = "until"
"""The name in a trial's configuration of the numbers of steps after which Ray is told a value."""
_FILE = "settings.json"


class TrialRunner(Protocol):
    """What a trial needs of `Stages`."""

    store: Any

    def run(self, trial: Any, settings: Mapping[str, Any], until: Any) -> Any:
        """The values of a trial."""

    def path(self, settings: Mapping[str, Any], end: int) -> Path:
        """The path of a trial."""


def train(stages: TrialRunner, config: Mapping[str, Any]) -> None:
    """Train the trial of this process of Ray Tune, and report its values. Called by Ray."""
    from ray import tune

    rungs, settings = _asked(stages, config)
    start = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            start, settings = continued((Folder(folder) / _FILE).read_text(encoding="utf-8"), settings)
    path = stages.path(settings, rungs[-1])
    left = tuple(rung for rung in rungs if rung > start)
    for steps, value in stages.run(number(tune.get_context().get_trial_id()), settings, left) if left else ():
        values = value if isinstance(value, dict) else {"value": value}
        with tempfile.TemporaryDirectory() as folder:
            (Folder(folder) / _FILE).write_text(history(path, steps), encoding="utf-8")
            tune.report({**values, "steps": steps}, checkpoint=tune.Checkpoint.from_directory(folder))


def _asked(stages: TrialRunner, config: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    until = config.get(UNTIL)
    if until is None:
        raise Invalid(
            "a trial of Ray does not say how many steps it has",
            advice='param_space={"until": (10, 40, 160), ...}: Ray is told a value after each of them',
        )
    if stages.store.folder is None:
        raise Invalid("processes of Ray share a storage", advice="Stages(..., storage=folder)")
    return as_rungs(until), {name: value for name, value in config.items() if name != UNTIL}


def history(path: Path, steps: int) -> str:
    """The settings of a trial up to a point, as text that is exact."""
    segments = [[segment.start, segment.settings] for segment in path.between(0, steps)]
    return json.dumps({"steps": steps, "settings": segments})


def continued(text: str, settings: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of steps of a history, and the settings of a trial that goes on from there with `settings`."""
    content = json.loads(text)
    steps, segments = int(content["steps"]), [(start, dict(values)) for start, values in content["settings"]]
    found: dict[str, Any] = {}
    before = {name for _, values in segments for name in values}
    for name in sorted(before ^ settings.keys()):
        what = "without" if name in settings else "with"
        advice = "name the same settings in all trials, from the first step on"
        raise Invalid(f"a trial goes on from a point that was trained {what} the setting {name!r}", advice=advice)
    for name, value in settings.items():
        found[name] = piecewise({start: values[name] for start, values in segments}).then(steps, value)
    return steps, found


def number(name: str) -> int:
    """The number of a trial of Ray, whose names end with it: `4f2a1_00012`."""
    last = re.search(r"(\d+)$", name)
    return int(last[1]) if last else 0


__all__ = ["continued", "history", "train"]
