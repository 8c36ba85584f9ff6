"""What is measured in a process of its own: `python -m benchmarks.trees.extremes NAME [ARGUMENT ...]` prints JSON.

`shapes`: 500 batches of new trees, with an empty cache. `deep`: a list of 10,000 words as a tree. `bad`: what errors
say. `memory WAY TREES`: the largest resident memory of batches of so many trees.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import daceml_train as dt
from benchmarks.trees import byhand
from benchmarks.trees.networks import WORDS, Node, Sequential, Sums, TreeLSTM, Unchanged, tree

SHAPES = 500
DEPTH = 10_000


def alone(name: str, *arguments: object, fresh: bool = False) -> Any:
    """The result of a measurement in a process of its own, with an empty cache if it is `fresh`."""
    command = [sys.executable, "-m", "benchmarks.trees.extremes", name, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        around = {**os.environ, **({"DACEML_TRAIN_CACHE": folder} if fresh else {})}
        done = subprocess.run(command, env=around, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def forests(compiled: Any) -> Any:
    """The programs of a compiled model's recursion."""
    return compiled._daceml_train.recursions["forward"].structures.programs


def shapes() -> dict[str, Any]:
    """Seconds of compilation for 500 batches of trees, none like another, of unchanged code."""
    dt.optimize(nn.Linear(3, 3))(torch.zeros(2, 3))  # builds the executor
    torch.manual_seed(0)
    compiled: Any = dt.optimize(Unchanged())
    r, seconds, slowest = random.Random(1), 0.0, 0.0
    for k in range(SHAPES):
        batch = [tree(r, r.randint(5, 50)) for _ in range(4)]
        start = time.perf_counter()
        compiled(batch).backward()
        took = time.perf_counter() - start
        if k == 0:
            seconds, first = took, forests(compiled).compiled
        else:
            slowest = max(slowest, took)
    found = forests(compiled)
    return {
        "shapes": SHAPES,
        "first_s": round(seconds, 2),
        "slowest_later_ms": round(slowest * 1e3, 1),
        "programs": len(found.programs),
        "recompiled": found.compiled - first,
    }


def deep() -> dict[str, Any]:
    """A list as a tree, and the same computed by a loop."""
    torch.manual_seed(0)
    model = Sums()
    loop = Sequential()
    loop.load_state_dict(copy.deepcopy(model.state_dict()))
    compiled: Any = dt.optimize(model)
    r = random.Random(0)
    words = [r.randrange(WORDS) for _ in range(DEPTH)]
    node = Node(words[0], 0)
    for word in words[1:]:
        node = Node(0, 0, [node, Node(word, 0)])
    times: dict[str, list[float]] = {"daceml_train": [], "a loop in PyTorch": []}
    for _ in range(4):
        for name, net, run in (
            ("daceml_train", model, lambda: compiled([node])),
            ("a loop in PyTorch", loop, lambda: loop(words)),
        ):
            net.zero_grad()
            start = time.process_time()
            run().square().sum().backward()
            times[name].append((time.process_time() - start) * 1e3)
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), loop.parameters(), strict=True)]
    worst = max(float((p - q).norm() / q.norm()) for p, q in pairs if p is not None and q is not None)
    return {"depth": DEPTH, "ms": {k: round(min(t[1:]), 1) for k, t in times.items()}, "difference": worst}


def bad() -> dict[str, str]:
    """What errors say of bad trees."""
    compiled: Any = dt.optimize(Sums())
    compiled([tree(random.Random(0), 6)])

    def message(batch: list[Any]) -> str:
        try:
            compiled(batch)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}; {'; '.join(error.__notes__)}"
        return "nothing"

    def below(last: Any) -> Node:
        return Node(0, 0, [Node(1, 0), Node(0, 0, [Node(2, 0), last])])

    cycle = below(None)
    cycle.children[1].children[1] = cycle
    return {
        "a cycle": message([cycle]),
        "a node without the attribute that others have": message([below(object())]),
        "children of different widths": message([below(Node(-1, 0))]),
        "an empty batch": message([]),
    }


def memory(way: str, count: str) -> int:
    """The largest resident memory while batches of `count` trees are computed, in bytes; 0 where it is not known."""
    torch.manual_seed(0)
    net = TreeLSTM()
    compiled: Any = dt.optimize(net) if way == "daceml_train" else None
    for seed in range(6):
        batch = TreeLSTM.data(seed, int(count))
        if seed == 3:  # programs are compiled
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        net.zero_grad()
        if way == "daceml_train":
            compiled(batch).backward()
        else:
            data = byhand.linearized(batch)
            (byhand.by_lists if way == "levels by hand, lists" else byhand.by_copies)(net, data).backward()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    """Print one measurement."""
    name, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    measure: Any = {"shapes": shapes, "deep": deep, "bad": bad, "memory": memory}[name]
    print(json.dumps(measure(*arguments)))


if __name__ == "__main__":
    main()
