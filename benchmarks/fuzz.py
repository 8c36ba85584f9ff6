# ruff: noqa: E501
"""Random models trained by compiled steps and compiled modules, held to eager execution and to float64.

    python -m benchmarks.fuzz [--models 50] [--seed 0] [--layers 7] [--jobs 1] [--results FILE]

A number is wrong if it is further from float64 than three times eager execution is, with and without noise in the last
bit of every operator's result, and than 1e-5 of the largest. What fails is shrunk and printed as a script that runs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.fuzz_layers import PROPOSALS, Draw, Layer
from benchmarks.fuzz_noise import LOST, RUNS, Rounding
from daceml_train.codegen import compile as kernels
from daceml_train.driver.module import state_of

FACTOR, FLOOR = 3.0, 1e-5
INPUTS = ([6], [4, 5], [3, 8], [2, 6, 6], [4, 5, 7], [3, 4], [1, 9])
LOSSES = ("cross_entropy", "cross_entropy", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss")
OPTIMIZERS = (
    "SGD(p, lr=0.05)", "SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01)", "SGD(p, lr=0.02, momentum=0.9, nesterov=True)",
    "SGD(p, lr=0.02, momentum=0.9, dampening=0.3)", "Adam(p, lr=1e-3, eps=1e-3, weight_decay=0.01)", "Adam(p, lr=1e-3, eps=1e-3)",
    "AdamW(p, lr=1e-3, eps=1e-3, amsgrad=True)", "AdamW(p, lr=1e-3, eps=1e-3, weight_decay=0.1)",
)  # fmt: skip
LARGEST = 3000
"""Elements of the largest activation."""


@dataclass(frozen=True)
class Case:
    """A model with all that decides how it is trained; `sizes` are the batch sizes of the first and the last step."""

    seed: int
    layers: tuple[Layer, ...]
    shape: tuple[int, ...]
    tokens: bool = False
    channels_last: bool = False
    loss: str = "mse_loss"
    optimizer: str = OPTIMIZERS[0]
    sizes: tuple[int, int] = (3, 4)
    threads: int = 1
    without: tuple[str, ...] = ()

    def model(self) -> str:
        """The source of the model."""
        lines = [line.replace("{n}", str(i)) for i, layer in enumerate(self.layers) for line in layer.init]
        text = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        text += [f"        {line}" for line in lines] + ["", "    def forward(self, h):"]
        body = [layer.forward.replace("{n}", str(i)) for i, layer in enumerate(self.layers)]
        used = set(re.findall(r"\ba\d+\b", "\n".join(body)))
        for i, line in enumerate(body):
            text += [f"        a{i} = h"] if f"a{i}" in used else []
            text += [f"        {line}"]
        return "\n".join([*text, "        return h", ""])

    def built(self) -> nn.Module:
        """The model, in float32."""
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "functools": functools, "Straight": Straight, "Twice": Twice}
        exec(self.model(), scope)
        torch.manual_seed(self.seed)
        model = scope["Model"]()
        assert isinstance(model, nn.Module)
        return model

    def inputs(self, number: int) -> Tensor:
        """The batch of a step; the last step's has the other size."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        shape = (self.sizes[number == 3], *self.shape)
        if self.tokens:
            return torch.randint(0, 7, shape, generator=generator)
        x = torch.randn(shape, generator=generator)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def target(self, output: Tensor, number: int) -> Tensor:
        """A target that fits the loss."""
        generator = torch.Generator().manual_seed(77 * self.seed + number)
        if self.loss == "cross_entropy":
            rank = output.dim() > 1
            shape = (output.shape[0], *output.shape[2:]) if rank else ()
            return torch.randint(0, output.shape[1 if rank else 0], shape, generator=generator)
        target = torch.randn(output.shape, generator=generator)
        return (target > 0).float() if "binary" in self.loss else target

    def script(self) -> str:
        """A program that shows the failure."""
        return "\n".join(
            [
                "# PYTHONPATH=. python THIS_FILE",
                "from benchmarks.fuzz import Case, Layer, check",
                *(f"# {line}" for line in self.model().splitlines()),
                f"print(check({self!r}))",
            ]
        )


# ---- running --------------------------------------------------------------------------------------------------------
Values = dict[str, Tensor]


class Straight(torch.autograd.Function):
    """Signs, with the derivative of the identity near zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """See the class."""
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class Twice(torch.autograd.Function):
    """Twice `x`, with a derivative of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """See the class."""
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """See the class."""
        return g * ctx.factor, None


class Rejected(Exception):
    """PyTorch refuses the model, or computes no finite numbers with it."""


def _targets(case: Case, model: nn.Module) -> list[Tensor]:
    model = copy.deepcopy(model)
    return [case.target(model(case.inputs(i)).detach(), i) for i in range(4)]


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    made = eval(f"torch.optim.{case.optimizer}", {"torch": torch, "p": list(model.parameters())})
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _state(found: Values, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found.update({f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()})
    found.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"state {key} of {name}"] = value.clone()


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None)


def _step(case: Case, targets: Sequence[Tensor], pipeline: Any) -> tuple[Values, list[str]]:
    model = case.built()
    optimizer = _optimizer(case, model)
    step = dt.training_step(model, getattr(F, case.loss), optimizer, keep_gradients=True, pipeline=pipeline, jobs=2)
    found: Values = {}
    for i in range(4):
        found[f"loss {i}"] = step(case.inputs(i), targets[i])
        found.update({f"step {i} gradient {n}": g for n, g in _gradients(model)})
    _state(found, model, optimizer)
    return found, list(step.breaks)


def _eager(case: Case, targets: Sequence[Tensor], dtype: torch.dtype, noise: int = 0) -> Values:
    with Rounding(noise) if noise else contextlib.nullcontext():
        return _trained(case, targets, dtype)


def _trained(case: Case, targets: Sequence[Tensor], dtype: torch.dtype) -> Values:
    model = case.built().to(dtype)
    optimizer, loss = _optimizer(case, model), getattr(F, case.loss)
    found: Values = {}
    for i in range(4):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (case.inputs(i), targets[i]))
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        found[f"loss {i}"] = value.detach()
        found.update({f"step {i} gradient {n}": g for n, g in _gradients(model)})
        optimizer.step()
    _state(found, model, optimizer)
    return found


def _module(
    case: Case, targets: Sequence[Tensor], dtype: torch.dtype, noise: int = 0, pipeline: Any = None
) -> tuple[Values, list[str]]:
    with Rounding(noise) if noise else contextlib.nullcontext():
        return _called(case, targets, dtype, pipeline)


def _called(case: Case, targets: Sequence[Tensor], dtype: torch.dtype, pipeline: Any) -> tuple[Values, list[str]]:
    model = case.built().to(dtype)
    called = dt.optimize(model, pipeline=pipeline, jobs=2) if pipeline is not None else model
    found: Values = {}
    for i in (0, 3):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (case.inputs(i), targets[i]))
        x = x.detach().clone().requires_grad_(x.is_floating_point())
        for parameter in model.parameters():
            parameter.grad = None
        output = called(x)
        getattr(F, case.loss)(output, y).backward()
        found[f"output {i}"] = output.detach()
        if x.grad is not None:
            found[f"call {i} gradient of the input"] = x.grad
        found.update({f"call {i} gradient {n}": g for n, g in _gradients(model)})
    found.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
    state = state_of(called)
    return found, list(state.backend.breaks) if state is not None else []


def _wrong(found: Values, eager: Values, noisy: Sequence[Values], exact: Values) -> str:
    """Which number is wrong, or nothing."""
    if found.keys() != eager.keys():
        return f"names differ: {sorted(found.keys() ^ eager.keys())}"
    typical = max((float(v.abs().max()) for n, v in exact.items() if "gradient" in n and v.numel()), default=0.0)
    for name, value in found.items():
        if value.shape != eager[name].shape or value.dtype != eager[name].dtype:
            return f"{name}: {value.dtype}{list(value.shape)} for {eager[name].dtype}{list(eager[name].shape)}"
        if not value.numel():
            continue
        scale = max(float(exact[name].abs().max()), 3e-2 * typical, 1e-30)
        compared = (value, eager[name], *(run[name] for run in noisy))
        errors = [float((t.double() - exact[name].double()).abs().max()) / scale for t in compared]
        spread = max(errors[2:])
        if spread < LOST and not errors[0] <= max(FACTOR * max(errors[1:]), FLOOR):
            return f"{name}: {errors[0]:.1e} from float64, eager {errors[1]:.1e}, with noise {spread:.1e}"
    return ""


@dataclass
class Verdict:
    """What is wrong (nothing: ""), and why parts ran as PyTorch runs them."""

    wrong: str
    breaks: list[str]


def pipeline_of(case: Case) -> Any:
    """TRAINING without the passes that the case leaves out."""
    return dt.TRAINING.without(*{type(p) for p in dt.TRAINING if type(p).__name__ in case.without})


def check(case: Case) -> Verdict:
    """Train the case in all ways. Raises `Rejected` where PyTorch does not take it."""
    torch._dynamo.reset()
    torch.set_num_threads(case.threads)
    try:
        targets = _targets(case, case.built())
        kinds = ((torch.float64, 0), (torch.float32, 0), *((torch.float32, n + 1) for n in range(RUNS)))
        steps = [_eager(case, targets, dtype, noise) for dtype, noise in kinds]
        calls = [_module(case, targets, dtype, noise)[0] for dtype, noise in kinds]
    except Exception as error:
        raise Rejected(str(error)) from error
    if not all(v.isfinite().all() and v.abs().max() < 1e6 for r in steps + calls for v in r.values() if v.numel()):
        raise Rejected("not finite")
    breaks: list[str] = []
    pipeline = pipeline_of(case)
    runs: list[tuple[str, list[Values], Callable[[], tuple[Values, list[str]]]]] = [
        ("training_step", steps, lambda: _step(case, targets, pipeline)),
        ("optimize", calls, lambda: _module(case, targets, torch.float32, pipeline=pipeline)),
    ]
    for path, (exact, eager, *noisy), run in runs:
        try:
            found, reasons = run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Verdict(f"{path} raises {type(error).__name__}: {error} ({where.filename}:{where.lineno})", breaks)
        breaks += reasons
        if wrong := _wrong(found, eager, noisy, exact):
            return Verdict(f"{path}: {wrong}", breaks)
    return Verdict("", breaks)


# ---- generating -----------------------------------------------------------------------------------------------------
def random_case(seed: int, most: int) -> Case:
    """A random model that PyTorch takes, for two batch sizes."""
    random = Random(str(seed))
    tokens = random.random() < 0.12
    shape = (random.choice([3, 5]),) if tokens else tuple(random.choice(INPUTS))
    sizes = tuple(random.sample([1, 2, 3, 4, 5], 2))
    names = sorted({type(p).__name__ for p in dt.TRAINING} - {"Decompose"})
    without = () if random.random() < 0.6 else tuple(random.sample(names, random.randrange(1, len(names))))
    case = Case(
        seed, (), shape, tokens, random.random() < 0.4, random.choice(LOSSES), random.choice(OPTIMIZERS),
        (sizes[0], sizes[1]), random.choice([1, 1, 2]), without,
    )  # fmt: skip
    wanted = random.randrange(2, most + 1)
    weights = [w for w, _ in PROPOSALS]
    if tokens:
        options = random.choice(["", ", padding_idx=0"])
        case = replace(case, layers=(Layer("h = self.e{n}(h)", (f"self.e{{n}} = nn.Embedding(7, 6{options})",)),))
    shapes = _shapes(case) or []
    for _ in range(200):
        if len(case.layers) >= wanted:
            break
        number = len(case.layers)
        saved = {f"a{i}": s for i, s in enumerate(shapes[:-1]) if not (tokens and i == 0)}
        linears = {
            f"l{i}": (int(m[1]), int(m[2]))
            for i, layer in enumerate(case.layers)
            for line in layer.init
            if (m := re.search(r"Linear\((\d+), (\d+)", line)) and line.startswith("self.l")
        }
        if not shapes[-1]:
            break
        layer = random.choices(PROPOSALS, weights)[0][1](Draw(random, shapes[-1], number, saved, linears))
        if layer is None or (not layer.init and not any(x.init for x in case.layers)):  # parameters first
            continue
        grown = replace(case, layers=(*case.layers, layer))
        found = _shapes(grown)
        if found is not None and math.prod(found[-1]) <= LARGEST and len(found[-1]) <= 5 and 0 not in found[-1]:
            case, shapes = grown, found
    return case


def _shapes(case: Case) -> list[tuple[int, ...]] | None:
    """Shapes of `h` before and behind each layer, with the first batch size; None where either size fails."""
    try:
        for number in (3, 0):
            found: list[tuple[int, ...]] = []
            every = replace(case, layers=tuple(_recorded(layer) for layer in case.layers))
            model = every.built()
            model.seen = found
            x = case.inputs(number)
            found.append(tuple(x.shape))
            output = model(x)
            if not output.isfinite().all() or (case.layers and not output.dtype.is_floating_point):
                return None
    except Exception:
        return None
    return found


def _recorded(layer: Layer) -> Layer:
    return replace(layer, forward=f"{layer.forward}; self.seen.append(tuple(h.shape))")


# ---- shrinking ------------------------------------------------------------------------------------------------------
def shrunk(case: Case, seconds: float) -> Case:
    """A smaller case that still fails."""
    until = time.perf_counter() + seconds
    tries: Callable[[Case], Iterator[Case]] = _smaller
    while True:
        for smaller in tries(case):
            if time.perf_counter() > until:
                return case
            try:
                wrong = check(smaller).wrong
                if not wrong:
                    continue
            except Rejected:
                continue
            case = smaller
            break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    shapes = _shapes(case) or []
    count = len(case.layers)
    for keep in (count // 2, count - 1):
        if 0 < keep < count:
            yield replace(case, layers=case.layers[:keep])
    if not case.tokens:
        for cut in (count // 2, 1):
            if 0 < cut < count and len(shapes) > cut and shapes[cut] and shapes[cut][0] == case.sizes[0]:
                yield replace(_without(case, range(cut)), shape=shapes[cut][1:])
    for i in range(count):
        yield _without(case, [i])
    changes: list[dict[str, Any]] = [{"without": ()}, {"threads": 1}, {"optimizer": OPTIMIZERS[0]}]
    changes += [{"channels_last": False}, {"loss": "mse_loss"}]
    for change in changes:
        if (smaller := replace(case, **change)) != case:
            yield smaller


def _without(case: Case, dropped: Sequence[int]) -> Case:
    """Without some layers; values before a dropped layer are those behind it."""
    places, left = {}, 0
    for i in range(len(case.layers)):
        places[i] = left
        left += i not in dropped
    layers = []
    for i, layer in enumerate(case.layers):
        if i in dropped:
            continue
        text = re.sub(r"\ba(\d+)\b", lambda m: f"a{places[int(m[1])]}", layer.forward)
        text = re.sub(r"self\.l(\d+)", lambda m: f"self.l{places.get(int(m[1]), 99)}", text)
        layers.append(replace(layer, forward=text))
    return replace(case, layers=tuple(layers))


# ---- the command ----------------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """What became of one seed: `kind` is rejected, compiled, partly or wrong."""

    seed: int
    kind: str
    wrong: str = ""
    breaks: tuple[str, ...] = ()
    seconds: float = 0.0
    """Of the processor, the compiler's included."""


def examined(seed: int, layers: int, flags: str) -> Outcome:
    """Make and check the model of a seed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if flags == "mixed":
        flags = "O3" if seed % 10 == 0 else "O0"
    set_flags(flags)
    before = sum(os.times()[:4])
    try:
        verdict = check(random_case(seed, layers))
    except Rejected:
        return Outcome(seed, "rejected", seconds=sum(os.times()[:4]) - before)
    spent = sum(os.times()[:4]) - before
    breaks = tuple({reason.split("\n", maxsplit=1)[0][:120] for reason in verdict.breaks})
    return Outcome(seed, "wrong" if verdict.wrong else "partly" if breaks else "compiled", verdict.wrong, breaks, spent)


def set_flags(level: str) -> None:
    """Compile kernels at this level of optimisation from here on."""
    wanted = tuple(f"-{level}" if re.fullmatch(r"-O\d", flag) else flag for flag in kernels.FLAGS)
    if wanted != kernels.FLAGS:
        kernels.FLAGS = wanted
        kernels._machine.cache_clear()


def outcomes(first: int, models: int, layers: int, flags: str, jobs: int, seconds: float) -> Iterator[Outcome]:
    """Outcomes of the seeds from `first` on, until `models` of them were models that PyTorch takes."""
    start, seeds, accepted = time.perf_counter(), itertools.count(first), 0
    while accepted < models and time.perf_counter() - start < seconds:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, max_tasks_per_child=60) as pool:
            running: dict[Any, int] = {}
            try:
                while running or (accepted < models and time.perf_counter() - start < seconds):
                    while len(running) < 2 * jobs and accepted + len(running) < models and time.perf_counter() - start < seconds:
                        seed = next(seeds)
                        running[pool.submit(examined, seed, layers, flags)] = seed
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        outcome = future.result()
                        del running[future]
                        accepted += outcome.kind != "rejected"
                        yield outcome
            except BrokenProcessPool:
                for lost in sorted(running.values()):
                    accepted += 1
                    yield Outcome(lost, "wrong", "the process that checked this or a neighbouring model died")


def main() -> int:
    """Run; the number of failures decides the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--models", type=int, default=50, help="models that PyTorch takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=7, help="most layers of a model")
    parser.add_argument("--kernels", default="mixed", help="optimisation of kernels; mixed: every tenth model at O3, others at O0")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no model starts after this time")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for shrinking one failure")
    parser.add_argument("--results", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console()
    counts: collections.Counter[str] = collections.Counter()
    breaks: collections.Counter[str] = collections.Counter()
    first: dict[str, int] = {}
    wrong: dict[int, str] = {}
    start, processor = time.perf_counter(), 0.0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("models", total=arguments.models)
        given = arguments.seed, arguments.models, arguments.layers, arguments.kernels, arguments.jobs, arguments.seconds
        for outcome in outcomes(*given):
            counts[outcome.kind] += 1
            processor += outcome.seconds
            progress.advance(task, outcome.kind != "rejected")
            for reason in outcome.breaks:
                breaks[reason] += 1
                first.setdefault(reason, outcome.seed)
            if outcome.kind == "wrong":
                wrong[outcome.seed] = outcome.wrong
                _report(console, outcome, arguments)
            if arguments.results is not None:
                spent = {"seconds": time.perf_counter() - start, "processor seconds": processor}
                _write(arguments.results, given, counts, breaks, wrong, spent)
    console.rule("summary")
    names = {"compiled": "compiled", "partly": "in pieces or partly PyTorch", "wrong": "wrong", "rejected": "rejected by PyTorch"}
    for kind, name in names.items():
        console.print(f"{counts[kind]:5} {name}")
    for reason, count in breaks.most_common():
        console.print(f"{count:5} x {reason} (seed {first[reason]})", markup=False)
    return 1 if counts["wrong"] else 0


def _report(console: Console, outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Print a failure and a script that shows it, as small as it gets."""
    console.rule(f"seed {outcome.seed}")
    console.print(outcome.wrong, markup=False, soft_wrap=True)
    case = random_case(outcome.seed, arguments.layers)
    if arguments.shrink and "died" not in outcome.wrong:
        case = shrunk(case, arguments.shrink)
        console.print(f"shrunk: {check(case).wrong}", markup=False, soft_wrap=True)
    console.print(case.script(), markup=False, soft_wrap=True, highlight=False)


def _write(path: Path, given: Any, counts: Any, breaks: Any, wrong: Any, spent: dict[str, float]) -> None:
    names = ("seed", "models", "layers", "kernels", "jobs", "seconds")
    content = {
        "arguments": {n: v for n, v in zip(names, given, strict=True) if v != math.inf},
        "torch": torch.__version__,
        "outcomes": dict(counts),
        "breaks": dict(breaks.most_common()),
        "wrong": wrong,
        **{name: round(value) for name, value in spent.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
