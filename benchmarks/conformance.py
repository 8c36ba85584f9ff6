"""PyTorch's own operator samples through `optimize`: values and gradients against eager execution.

    python -m benchmarks.conformance [--only NAME] [--samples 3] [--share 0.3] [--json FILE]

Each sample becomes the forward method of a module, alone and as `h + op(h)` where shapes allow. A result may be as far
from a float64 run as float32 tolerances and ten times eager's own error allow. Exits with 1 if a sample is wrong or
raises; what runs in PyTorch is counted by reason.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.frontends.torch.test_conformance import UNINITIALISED

RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "pca_lowrank", "svd_lowrank",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.rrelu",
}  # fmt: skip
"""They draw other numbers than PyTorch; single samples that do (attention with dropout) are found by running twice."""
KINDS = ("right", "wrong", "as PyTorch", "raised")
RELATIVE, ABSOLUTE, FACTOR = 1e-4, 1e-5, 10.0


@dataclass
class Outcome:
    """What came of one sample; `form` is `op` or `h + op(h)`, `detail` says what differs or why."""

    operator: str
    sample: int
    form: str
    kind: str
    detail: str = ""
    fallbacks: tuple[str, ...] = ()


@dataclass
class Results:
    """Values, gradients by the inputs that require them, and inputs after the call, which may have been written."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    differentiable: list[bool]


# ---- samples as modules ---------------------------------------------------------------------------------------------
def entries() -> list[Any]:
    """The differentiable float32 operators whose results are determined."""
    left_out = UNINITIALISED | RANDOM
    return [op for op in op_db if torch.float32 in op.dtypes and op.supports_autograd and op.name not in left_out]


def label(op: Any) -> str:
    """The operator's name and variant."""
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def as_module(function: Callable[..., Any], sample: Any, residual: bool) -> tuple[type[nn.Module], list[Tensor]]:
    """A module class whose forward takes the sample's tensors and calls `function` as written out in the sample."""
    tensors: list[Tensor] = []
    names: dict[str, Any] = {"function": function}

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            tensors.append(value)
            return f"x{len(tensors) - 1}"
        if type(value) is list:
            return f"[{', '.join(map(text, value))}]"
        if type(value) is tuple:
            return f"({''.join(text(v) + ', ' for v in value)})"
        names[f"c{len(names)}"] = value
        return f"c{len(names) - 1}"

    given = [text(a) for a in (sample.input, *sample.args)] + [f"{k}={text(v)}" for k, v in sample.kwargs.items()]
    call = f"function({', '.join(given)})"
    taken = "".join(f", x{i}" for i in range(len(tensors)))
    exec(f"def forward(self{taken}):\n    return {'x0 + ' if residual else ''}{call}\n", names)
    return type("Sample", (nn.Module,), {"forward": names["forward"]}), tensors


def run(module: nn.Module, sample: Any, tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None) -> Results:
    """One forward and, given cotangents, one backward pass over copies of the inputs."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    made = module(*inputs)
    values = [v for v in pytree.tree_leaves(sample.output_process_fn_grad(made)) if isinstance(v, Tensor)]
    gradients: list[Tensor | None] = []
    through = [v for v in values if v.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if cotangents is not None and len(through) == len(cotangents) and through and wanted:
        seeds = [c.to(v.dtype) for c, v in zip(cotangents, through, strict=True)]
        gradients = list(torch.autograd.grad(through, wanted, seeds, allow_unused=True))
    written = [t.detach() for t in inputs if not t.requires_grad]
    return Results([v.detach() for v in values], gradients, written, [v.requires_grad for v in values])


def doubled(value: Any) -> Any:
    """A tensor in double precision, if it is one of floating-point numbers."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.detach().to(wide).requires_grad_(value.requires_grad)
    return value


# ---- comparison -----------------------------------------------------------------------------------------------------
def difference(ours: Results, eager: Results, exact: Results | None) -> str:
    """What differs, or an empty text."""
    if ours.differentiable != eager.differentiable:
        return f"requires_grad is {ours.differentiable} instead of {eager.differentiable}"
    for what in ("values", "gradients", "inputs"):
        found, expected = getattr(ours, what), getattr(eager, what)
        reference = getattr(exact, what) if exact is not None else [None] * len(expected)
        if len(found) != len(expected):
            return f"{len(found)} {what} instead of {len(expected)}"
        if len(reference) != len(expected):
            reference = [None] * len(expected)
        for i, (a, b, c) in enumerate(zip(found, expected, reference, strict=True)):
            if said := _differs(a, b, c):
                return f"{what}[{i}]: {said}"
    return ""


def _differs(ours: Tensor | None, eager: Tensor | None, exact: Tensor | None) -> str:
    if eager is None or ours is None:  # a gradient that does not exist is zero
        other = ours if eager is None else eager
        return "" if other is None or not torch.count_nonzero(other) else "there is one only on one side"
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        return f"{ours.dtype}{list(ours.shape)} instead of {eager.dtype}{list(eager.shape)}"
    if eager.layout is not torch.strided or not eager.numel():
        return ""
    if not (eager.is_floating_point() or eager.is_complex()):
        return "" if torch.equal(ours, eager) else f"{int((ours != eager).sum())} of {eager.numel()} elements"
    if eager.is_complex():
        ours, eager = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(eager.resolve_conj())
        exact = torch.view_as_real(exact.resolve_conj()) if exact is not None and exact.is_complex() else None
    if exact is not None and (exact.shape != eager.shape or not exact.is_floating_point()):
        exact = None
    ours, eager = ours.double(), eager.double()
    exact = eager if exact is None else exact.double()
    settled = eager.isfinite() & exact.isfinite()
    odd = ~eager.isfinite() & ~exact.isfinite()
    same = torch.where(eager.isnan(), ours.isnan(), ours == eager)
    if not bool((same | ~odd).all()):
        return f"{int((~same & odd).sum())} of {eager.numel()} elements should not be finite, or otherwise so"
    a, b, c = ours[settled], eager[settled], exact[settled]
    if not a.numel():
        return ""
    allowed = RELATIVE * c.abs() + ABSOLUTE * c.abs().median().clamp(min=1.0) + FACTOR * (b - c).abs().max()
    error = (a - c).abs()
    bad = ~(error <= allowed)
    if not bool(bad.any()):
        return ""
    at = int(torch.where(bad, error.nan_to_num(torch.inf), -1.0).argmax())
    return f"{int(bad.sum())} of {eager.numel()} elements, such as {a[at]:.6g} instead of {c[at]:.6g}"


# ---- one sample -----------------------------------------------------------------------------------------------------
def outcome(op: Any, number: int, sample: Any, residual: bool, cache: str) -> Outcome | None:
    """Compare one sample in one form; None where eager refuses it, or gives other numbers every time."""
    form = "h + op(h)" if residual else "op"
    torch.manual_seed(0)
    made, tensors = as_module(op.op, sample, residual)
    try:
        plain = run(made(), sample, tensors, None)
        with_gradient = _through(made, sample, tensors)
        cotangents = [torch.randn_like(v) for v in with_gradient]
        eager = run(made(), sample, tensors, cotangents)
    except Exception:
        return None
    if difference(plain, dataclasses.replace(eager, gradients=[]), None):
        return None  # random
    try:
        wide, doubles = as_module(op.op, sample.transform(doubled), residual)
        exact: Results | None = run(wide(), sample, doubles, [doubled(c) for c in cotangents])
    except Exception:
        exact = None
    compiled = dt.optimize(made(), cache=cache, jobs=1)
    try:
        ours = run(compiled, sample, tensors, cotangents)
    except Exception as error:
        return Outcome(label(op), number, form, "raised", f"{type(error).__name__}: {error}")
    state = state_of(compiled)
    assert state is not None
    fallbacks = tuple(dict.fromkeys(name for record in state.backend.records for name, _ in record.fallbacks))
    said = difference(ours, eager, exact)
    if said:
        return Outcome(label(op), number, form, "wrong", said, fallbacks)
    breaks = state.backend.breaks
    internal = [reason for reason in breaks if reason.startswith("internal error")]
    if breaks:
        return Outcome(label(op), number, form, "raised" if internal else "as PyTorch", (internal or breaks)[0])
    if not state.backend.graphs:
        return Outcome(label(op), number, form, "as PyTorch", "Dynamo found nothing to compile")
    return Outcome(label(op), number, form, "right", "", fallbacks)


def _through(made: type[nn.Module], sample: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    leaves = pytree.tree_leaves(sample.output_process_fn_grad(made()(*inputs)))
    return [v.detach() for v in leaves if isinstance(v, Tensor) and v.requires_grad]


def fits(op: Any, sample: Any) -> bool:
    """Whether `h + op(h)` has the shape of `h`."""
    h = sample.input
    if not isinstance(h, Tensor) or h.dtype is not torch.float32:
        return False
    try:
        made = op.op(h.detach().clone(), *sample.args, **sample.kwargs)
    except Exception:
        return False
    return isinstance(made, Tensor) and made.shape == h.shape and made.dtype is h.dtype


def outcomes(op: Any, samples: int, cache: str) -> Iterator[Outcome]:
    """The outcomes of the first samples of one operator."""
    torch.manual_seed(0)
    try:
        given = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:samples]
    except Exception as error:
        yield Outcome(label(op), 0, "op", "as PyTorch", f"no samples here: {type(error).__name__}")
        return
    for number, sample in enumerate(given):
        for residual in (False, True) if number == 0 and fits(op, sample) else (False,):
            try:
                found = outcome(op, number, sample, residual, cache)
            except Exception as error:
                found = Outcome(label(op), number, "op", "raised", f"while comparing, {type(error).__name__}: {error}")
            finally:
                torch._dynamo.reset()
            if found is not None:
                yield found


# ---- report ---------------------------------------------------------------------------------------------------------
def _general(reason: str) -> str:
    """A reason without what differs from sample to sample."""
    return re.sub(r"'[^']*'|\d+|\[[^]]*\]", "…", reason.splitlines()[0] if reason else "")[:110]


def summary(found: Sequence[Outcome]) -> Table:
    """How many samples came out how, and the reasons of those that run as PyTorch."""
    made = Table(title="Operators of PyTorch through optimize", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("samples", no_wrap=True)
    made.add_column("number", justify="right")
    counts = collections.Counter(o.kind for o in found)
    for kind in KINDS:
        made.add_row(kind, str(counts[kind]), style="bold red" if kind in ("wrong", "raised") and counts[kind] else "")
        reasons = collections.Counter(_general(o.detail) for o in found if o.kind == kind == "as PyTorch")
        for reason, count in reasons.most_common():
            made.add_row(f"  {reason}", str(count), style="dim")
    fallen = sum(bool(o.fallbacks) for o in found if o.kind == "right")
    made.add_row("right, with operators that have no rule of ours", str(fallen), style="dim")
    return made


def main() -> int:
    """Run, print; 1 if anything is wrong or raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="an operator's name; may be repeated")
    parser.add_argument("--samples", type=int, default=3, help="samples per operator")
    parser.add_argument("--share", type=float, default=1.0, help="a random share of the operators")
    parser.add_argument("--seed", type=int, default=0, help="which share")
    parser.add_argument("--json", type=Path, help="a file for the outcomes, one JSON object per line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # breaks graphs
    console = Console(width=None if sys.stdout.isatty() else 140)
    chosen = [op for op in entries() if not options.only or {op.name, label(op)} & set(options.only)]
    if options.share < 1:
        chosen = random.Random(options.seed).sample(chosen, max(1, round(options.share * len(chosen))))
    if not chosen:
        parser.error(f"no differentiable operator is named {' or '.join(options.only)}")
    if options.json:
        options.json.write_text("")
    found: list[Outcome] = []
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    folder = tempfile.TemporaryDirectory(prefix="daceml_train-conformance-")
    with folder as cache, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for op in chosen:
            progress.update(task, description=label(op))
            for one in outcomes(op, options.samples, cache):
                found.append(one)
                if one.kind in ("wrong", "raised"):
                    where = f"{one.operator} #{one.sample} {one.form}"
                    progress.console.print(f"{one.kind}: {where}: {one.detail}", markup=False, highlight=False)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(one)) + "\n")
            progress.advance(task)
    console.print(summary(found))
    return int(any(o.kind in ("wrong", "raised") for o in found))


if __name__ == "__main__":
    sys.exit(main())
