"""Random index programs: values, first and second derivatives, and the graph's lowering, against independent oracles.

`python -m benchmarks.novel.fuzz 1000` runs seeds 0..999. A program is the text of a Python function in the notation, so
the same text runs on NumPy scalars. Values are compared with that; derivatives with autograd through PyTorch calls.
"""

from __future__ import annotations

import collections
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from daceml_train import expressions
from daceml_train.analysis.interpret import interpret
from daceml_train.expressions.adjoint import derivative
from daceml_train.expressions.operator import Expression
from daceml_train.expressions.program import Program, parsed
from daceml_train.expressions.reference import reference
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.expressions.evaluate import evaluate
from daceml_train.frontends.torch.expressions.function import expression
from daceml_train.graph.graph import Graph

BODIES = (
    "{a} * {b}",
    "{a} * {b} * {c}",
    "tanh({a}) * {b} + {c}",
    "where({a} > {b}, {a} * {a}, {c})",
    "{a} + 2 * {b}",
    "exp({a} - {b}) / (1 + {b} * {b})",
    "sigmoid({a}) - {c} * {b}",
    "maximum({a}, {b}) * {c}",
)
REDUCTIONS = ("total", "total", "largest", "least", "logsumexp", "product")
RULES = (".outside(0)", ".outside(0)", ".outside(0.5)", ".wrap", ".clamp")


class Case:
    """One random program and its operands."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.out = [f"o{i}" for i in range(self.random.randint(1, 3))]
        self.reduced = [f"r{i}" for i in range(self.random.choice((0, 1, 1, 2)))]
        self.sizes = {n: self.random.randint(1, 5 if n in self.out else 4) for n in self.out + self.reduced}
        self.ranks = {"x": self.random.randint(1, 3), "y": self.random.randint(1, 2)}
        draw = np.random.default_rng(seed)
        shapes = {n: tuple(self.random.randint(1, 6) for _ in range(r)) for n, r in self.ranks.items()}
        self.arrays = {n: draw.standard_normal(s) for n, s in shapes.items()}
        self.arrays["ids"] = draw.integers(-1, 6, (self.random.randint(2, 4),))
        self.text = self.function()

    def index(self, names: list[str]) -> str:
        r = self.random
        if r.random() < 0.08:
            return f"ids.clamp[{r.choice(names)}]"
        chosen = r.sample(names, min(len(names), r.choice((0, 1, 1, 1, 2, 2, 3))))
        text = " + ".join([str(r.randint(-2, 3)), *(f"{r.choice((1, 1, 1, 2, 3, -1, -2))} * {n}" for n in chosen)])
        if chosen and r.random() < 0.15:
            return f"({text}) {r.choice(('//', '%'))} {r.choice((2, 3))}"
        return text

    def read(self, name: str, rank: int, names: list[str]) -> str:
        return f"{name}{self.random.choice(RULES)}[{', '.join(self.index(names) for _ in range(rank))}]"

    def body(self, names: list[str], sources: dict[str, int]) -> str:
        arrays = [self.random.choice(list(sources)) for _ in range(3)]
        a, b, c = (self.read(n, sources[n], names) for n in arrays)
        return self.random.choice(BODIES).format(a=a, b=b, c=c)

    def comprehension(self, sources: dict[str, int]) -> str:
        names = self.out + self.reduced
        inner = self.body(names, sources)
        if self.reduced:
            loops = " ".join(f"for {n} in size({self.sizes[n]})" for n in self.reduced)
            inner = f"{self.random.choice(REDUCTIONS)}({inner} {loops})"
            if self.random.random() < 0.3:
                inner = f"{inner} * {self.body(self.out, sources)}"
        return f"array({inner} {' '.join(f'for {n} in size({self.sizes[n]})' for n in self.out)})"

    def function(self) -> str:
        lines = ["def program(x, y, ids):"]
        sources = dict(self.ranks)
        for k in range(self.random.choice((1, 1, 2))):
            lines.append(f"    t{k} = {self.comprehension(sources)}")
            sources[f"t{k}"] = len(self.out)
        results = [n for n in sources if n.startswith("t")]
        chosen = results if self.random.random() < 0.3 else results[-1:]
        return "\n".join([*lines, f"    return {', '.join(chosen)}"])

    def callable(self) -> Callable[..., Any]:
        """The function of the text."""
        scope: dict[str, Any] = {name: getattr(expressions, name) for name in expressions.__all__}
        exec(compile(self.text, "<random program>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _differs(what: str, found: Any, expected: Any) -> str:
    for a, b in zip(found, expected, strict=True):
        a, b = (np.asarray(v.detach() if isinstance(v, torch.Tensor) else v, dtype=float) for v in (a, b))
        scale = max(1.0, float(np.abs(b).max(initial=0)))
        if a.shape != b.shape or not np.abs(a - b).max(initial=0) <= 1e-9 * scale:
            return f"{what}: {a.shape} and {b.shape}, off by {np.abs(a - b).max() if a.shape == b.shape else '-'}"
    return ""


def _graph(program: Program, given: list[torch.Tensor]) -> list[Any]:
    graph = Graph()
    values = [graph.input(f"x{i}", types.tensor(x)) for i, x in enumerate(given)]
    graph.output(*graph.emit(Expression(program.text), *values))
    return interpret(graph, {f"x{i}": x.detach().numpy() for i, x in enumerate(given)}).outputs


def wrong(seed: int, lowered: bool = True) -> str:
    """What is wrong with the program of a seed; an empty string for nothing."""
    case = Case(seed)
    function = case.callable()
    operands = [torch.tensor(a, requires_grad=a.dtype == float) for a in case.arrays.values()]
    program = expression(function).program(*operands)  # type: ignore[attr-defined]
    results = evaluate(parsed(program.text), operands)
    with np.errstate(all="ignore"):
        message = _differs("values", results, _tuple(reference(function, *case.arrays.values())))
    if message:
        return message
    torch.manual_seed(seed)
    seeds = [torch.randn_like(r).requires_grad_() for r in results]
    wanted = [x for x in operands if x.is_floating_point()]
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True, "create_graph": True}
    expected = torch.autograd.grad(results, wanted, seeds, **options)
    text, reads = derivative(program.text, (True,) * len(seeds), tuple(x.is_floating_point() for x in operands))
    given = [*operands, *results, *seeds]
    own = _tuple(expression(function)(*operands))
    found = torch.autograd.grad(own, wanted, seeds, **options)
    if message := _differs("gradients", found, expected):
        return message
    if lowered:
        chosen = [given[i] for i in reads]
        message = _differs("lowering", _graph(program, operands), results)
        message = message or _differs("lowering of the derivative", _graph(parsed(text), chosen), expected)
        if message:
            return message
    penalty = [sum(((g * g).sum() for g in gs), start=torch.zeros(())) for gs in (found, expected)]
    if not all(math.isfinite(float(p.detach())) and p.requires_grad for p in penalty):
        return "" if penalty[0].requires_grad == penalty[1].requires_grad else "one gradient is constant"
    second = [torch.autograd.grad(p, [*wanted, *seeds], allow_unused=True, materialize_grads=True) for p in penalty]
    return _differs("second derivatives", *second)


def main(first: int, last: int) -> int:
    """Run the seeds; returns how many are wrong."""
    count: collections.Counter[str] = collections.Counter()
    for seed in range(first, last):
        try:
            message = wrong(seed)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        count["wrong" if message else "right"] += 1
        if message and count["wrong"] < 6:
            print(f"seed {seed}: {message}\n{Case(seed).text}")
    print(f"{last - first} programs: {dict(count)}")
    return count["wrong"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    start = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    sys.exit(bool(main(start, start + int(sys.argv[1]))))
