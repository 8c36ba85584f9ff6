"""`python -m benchmarks.second_process`: what the first step of a new process costs where the cache is warm.

BERT-base of Hugging Face (random weights, AdamW, 4 sentences of 64 tokens) trains two steps in a process of its own,
which fills the cache, and in another one, which is measured. Processor seconds of the first step are split by what they
are spent on. Beside it stands what TorchDynamo alone takes for the same model: a backend of `torch.compile` that
returns the graph as it is.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "second_process.json"
PARTS = {
    "stored": "the capture of an earlier process: guards and comparisons",
    "dynamo": "TorchDynamo: tracing Python",
    "guards": "TorchDynamo: guards",
    "capture": "the graph of operators: AOTAutograd and rules",
    "load": "the program, read from the cache",
    "bind": "optimizer state, matmul libraries, addresses",
    "run": "the step itself",
}


def main() -> None:
    """Measure, print, and store the figures with `--save`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--one", choices=("step", "dynamo"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_step() if options.one == "step" else _dynamo()))
        return
    cold, warm, floor = _process("step"), _process("step"), _process("dynamo")
    found = {"cold": cold, "warm": warm, "dynamo_alone": floor, "load": os.getloadavg()[0]}
    for name in ("cold", "warm"):
        one = found[name]
        print(f"{name}: first step {one['wall']:.2f} s, {one['processor']:.2f} processor seconds")
    for part, about in PARTS.items():
        print(f"  {warm[part]:5.2f}  {about}")
    print(f"TorchDynamo alone, with the model's forward pass: {floor['processor']:.2f} processor seconds")
    print(f"load average {found['load']:.1f}")
    if options.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _process(kind: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.second_process", "--one", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _bert() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(num_labels=2, problem_type="single_label_classification")
    tokens, labels = torch.randint(0, config.vocab_size, (4, 64)), torch.randint(0, 2, (4,))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return BertForSequenceClassification(config), batch


def _step() -> dict[str, float]:
    import torch
    from torch._dynamo.guards import CheckFunctionManager

    import daceml_train as dt
    from daceml_train.driver import stored_captures
    from daceml_train.driver.step import TrainingStep
    from daceml_train.frontends.torch.dynamo.tracing import _Callback

    spent: dict[str, float] = collections.defaultdict(float)
    owners: Any = ((_Callback, "__call__"), (CheckFunctionManager, "__init__"), (TrainingStep, "_collect"))
    owners += ((TrainingStep, "_bind_captured"), (TrainingStep, "_compiled"), (TrainingStep, "_run_bound"))
    owners += ((stored_captures, "load"),)
    for owner, name in owners:
        setattr(owner, name, _timed(getattr(owner, name), name, spent))
    model, batch = _bert()
    step = dt.training_step(model, None, torch.optim.AdamW(model.parameters(), lr=1e-5))
    began, used = time.perf_counter(), time.process_time()
    step(batch)
    wall, processor = time.perf_counter() - began, time.process_time() - used
    if step.breaks:
        sys.exit(f"the step is not one program: {step.breaks}")
    return {
        "wall": wall,
        "processor": processor,
        "stored": spent["load"],
        "dynamo": max(spent["__call__"] - spent["_collect"] - spent["__init__"], 0.0),
        "guards": spent["__init__"] if spent["__call__"] else 0.0,
        "capture": spent["_collect"],
        "load": spent["_compiled"],
        "bind": spent["_bind_captured"] - spent["_compiled"],
        "run": spent["_run_bound"],
    }


def _dynamo() -> dict[str, float]:
    import torch

    model, batch = _bert()
    compiled = torch.compile(model, backend=lambda graph, _: graph.forward)
    began, used = time.perf_counter(), time.process_time()
    compiled(**batch)
    return {"wall": time.perf_counter() - began, "processor": time.process_time() - used}


def _timed(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        used = time.process_time()
        try:
            return function(*arguments, **keywords)
        finally:
            spent[name] = spent.get(name, 0.0) + time.process_time() - used

    return run


if __name__ == "__main__":
    main()
