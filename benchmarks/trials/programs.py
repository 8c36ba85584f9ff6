"""Programs that a search over values compiles, in two processes with one cache, and what a change of a value costs."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import daceml_train as dt
from benchmarks.trials import digits

CHANGES = 60
OPTIMIZERS = ("SGD", "AdamW")


def changing(kind: str, seed: int) -> dict[str, Any]:
    """Change one value after another, and train a step with each: programs, new and from the cache, and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = digits.Net(), torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    own: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, weight_decay=1e-4, **own)
    step = dt.training_step(model, loss, optimizer, clip_norm=1.0)
    group, chance = optimizer.param_groups[0], random.Random(seed)
    values = {
        "rate": lambda: group.update(lr=chance.uniform(0.001, 0.1)),
        "decay": lambda: group.update(weight_decay=chance.uniform(1e-5, 0.1)),
        "dropout": lambda: setattr(model.dropout, "p", chance.uniform(0.05, 0.5)),
        "smoothing": lambda: setattr(loss, "label_smoothing", chance.uniform(0.01, 0.3)),
    }
    if kind == "SGD":
        values["momentum"] = lambda: group.update(momentum=chance.uniform(0.5, 0.95))
    else:
        values["betas"] = lambda: group.update(betas=(chance.uniform(0.8, 0.95), chance.uniform(0.9, 0.999)))
    batches = {rows: digits.data(0, {"batch": rows}) for rows in (32, 48, 64)}
    for rows in chance.sample(sorted(batches), 3):
        step(*batches[rows])
    before, added = len(step.records), []
    for _ in range(CHANGES):
        batch = batches[chance.choice(sorted(batches))]
        step(*batch)
        usual = min(_seconds(step, batch) for _ in range(5))
        values[chance.choice(sorted(values))]()
        added.append(_seconds(step, batch) - usual)
    assert not step.breaks, step.breaks
    return {
        "compiled": sum(not record.warm for record in step.records),
        "loaded": sum(record.warm for record in step.records),
        "by a value": len(step.records) - before,
        "added": added,
    }


def _seconds(step: Any, batch: Any) -> float:
    start = time.perf_counter()
    step(*batch)
    return time.perf_counter() - start


def compiled(kills: int) -> dict[str, Any]:
    """The row: for each optimizer two processes side by side, on one empty cache."""
    found = []
    for kind in OPTIMIZERS:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "DACEML_TRAIN_CACHE": folder}
            command = [sys.executable, "-m", "benchmarks.trials.programs", kind]
            children = [
                subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE) for seed in (0, 1)
            ]
            told = [json.loads(child.communicate()[0]) for child in children]
        assert not any(child.returncode for child in children)
        added = [seconds * 1e3 for each in told for seconds in each["added"]]
        row = {name: sum(each[name] for each in told) for name in ("compiled", "loaded", "by a value")}
        name = f"{kind}, {2 * CHANGES} changes in two processes"
        found.append({"name": name, **row, "median ms": statistics.median(added), "worst ms": max(added)})
    return {"searches": found}


if __name__ == "__main__":
    print(json.dumps(changing(sys.argv[1], int(sys.argv[2]))))
