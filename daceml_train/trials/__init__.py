"""Trials: a hyper-parameter search as a tree of stages, in which no training step runs twice.

`schedules` are the settings of a trial over time, `keys` name a point in training by a hash of all that led there,
`tree` merges trials with a common beginning, `state` and `checkpoints` save and restore a point to the bit, and
`stages` trains from point to point, `pool` on several processes. `simulate` predicts the time on many workers.
"""

from __future__ import annotations

from daceml_train.trials import schedules as schedule
from daceml_train.trials.pool import run_trials
from daceml_train.trials.stages import Stages

__all__ = ["Stages", "run_trials", "schedule"]
