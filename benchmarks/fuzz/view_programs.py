"""Random programs of views and changes in place: chains of them at any depth, and results that share memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.checking import Rejected

_SHAPES = ((3, 4), (4, 3), (2, 3, 4), (4, 4), (6,), (2, 6), (1, 4, 3), (2, 2, 3, 2), (3, 1, 4))
_LAYOUTS = ("plain", "permuted", "sliced")
_NUMBERS = (0.5, 1.5, -2.0, 3.0)


@dataclass(frozen=True)
class ViewProgram:
    """A forward pass `forward(self, x, y)`: `x` carries a gradient, as `self.w` does; `y` and `self.b` do not."""

    seed: int
    shape: tuple[int, ...]
    layouts: tuple[str, str]
    lines: tuple[str, ...]
    results: tuple[str, ...]

    def source(self) -> str:
        """The module's code."""
        lines = "w, b = self.w, self.b", *self.lines, f"return [{', '.join(self.results)}]"
        return "\n    ".join(("def forward(self, x, y):", *lines)) + "\n"

    def module(self) -> nn.Module:
        """The module, its parameter and buffer as the seed has them."""
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(self.source(), f"<views {self.seed}>", "exec"), scope)
        result: nn.Module = type("Program", (nn.Module,), {"forward": scope["forward"]})()
        generator = torch.Generator().manual_seed(self.seed)
        result.w = nn.Parameter(torch.randn(self.shape, generator=generator))
        result.register_buffer("b", torch.randn(self.shape, generator=generator))
        return result

    def inputs(self) -> tuple[Tensor, Tensor]:
        """`x`, a leaf, and `y`, in their layouts."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        x, y = (_laid_out(torch.randn(self.shape, generator=generator), layout) for layout in self.layouts)
        return x.detach().requires_grad_(), y  # detached, or a leaf that is itself a view has no gradient once changed

    def smaller(self) -> Iterator[ViewProgram]:
        """Programs that lack a result, a statement, a view of a result, or the layouts of the inputs."""
        results, lines = self.results, self.lines
        for i in range(len(results) if len(results) > 1 else 0):
            yield replace(self, results=(*results[:i], *results[i + 1 :]))
        yield from (replace(self, lines=(*lines[:i], *lines[i + 1 :])) for i in reversed(range(len(lines))))
        for i, result in enumerate(results):
            if (name := re.match(r"\w+", result)) and name[0] != result:
                yield replace(self, results=(*results[:i], name[0], *results[i + 1 :]))
        if self.layouts != ("plain", "plain"):
            yield replace(self, layouts=("plain", "plain"))


def _laid_out(values: Tensor, layout: str) -> Tensor:
    if layout == "permuted":
        order = list(reversed(range(values.dim())))
        return values.permute(order).contiguous().permute(order)
    if layout == "sliced":
        wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1])
        wide[..., 1::2] = values
        return wide[..., 1::2].detach()  # no view for autograd, and not at the beginning of its memory
    return values


# ---- statements -----------------------------------------------------------------------------------------------------
def _transpose(r: random.Random, v: Tensor) -> str:
    return f".transpose({r.randrange(v.dim())}, {r.randrange(v.dim())})" if v.dim() else ".view(1)"


def _permute(r: random.Random, v: Tensor) -> str:
    order = list(range(v.dim()))
    r.shuffle(order)
    return f".permute({order})"


def _reshape(r: random.Random, v: Tensor) -> str:
    left, shape = v.numel(), []
    while left > 1 and len(shape) < 3:
        part = r.choice([n for n in range(1, left + 1) if left % n == 0])
        shape.append(part)
        left //= part
    return f".{r.choice(['view', 'reshape'])}({[*shape, left]})"


def _slice(r: random.Random, v: Tensor) -> str:
    parts = []
    for n in v.shape[: r.randint(1, max(1, v.dim()))]:
        first = r.randrange(max(1, n))
        last, step = r.randint(first + 1, max(first + 1, n)), r.choice((1, 1, 2))
        parts.append(r.choice((f"{first}:{last}:{step}", f"{first}:", ":", str(first))))
    return f"[{', '.join(parts) or '...'}]"


def _dimension(name: str) -> Callable[[random.Random, Tensor], str]:
    return lambda r, v: f".{name}({r.randrange(max(1, v.dim()))})"


def _piece(r: random.Random, v: Tensor) -> str:
    d = r.randrange(max(1, v.dim()))
    n = v.shape[d] if v.dim() else 1
    call = r.choice((f"split({r.randint(1, n)}, {d})", f"chunk({r.randint(1, 3)}, {d})", f"unbind({d})"))
    return f".{call}[{r.randrange(2)}]"


def _as_strided(r: random.Random, v: Tensor) -> str:
    held = v.untyped_storage().nbytes() // v.element_size()
    sizes = [r.randint(1, 3) for _ in range(r.randint(1, 3))]
    strides = [r.choice((0, 1, 1, 2, 3, 4)) for _ in sizes]
    span = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return f".as_strided({sizes}, {strides}, {r.randint(0, max(0, held - 1 - span))})"


def _expand(r: random.Random, v: Tensor) -> str:
    sizes = [r.randint(2, 3) if n == 1 else n for n in v.shape]
    return f".expand({[2, *sizes] if r.random() < 0.5 or not sizes else sizes})"


def _unfold(r: random.Random, v: Tensor) -> str:
    d = r.randrange(max(1, v.dim()))
    return f".unfold({d}, {r.randint(1, max(1, v.shape[d] if v.dim() else 1))}, {r.randint(1, 2)})"


VIEWS: tuple[Callable[[random.Random, Tensor], str], ...] = (
    _transpose,
    _transpose,
    _permute,
    _reshape,
    _slice,
    _slice,
    _piece,
    _as_strided,
    _expand,
    _unfold,
    _dimension("unsqueeze"),
    _dimension("squeeze"),
    lambda r, v: ".T" if v.dim() == 2 else ".mT",
    lambda r, v: f".diagonal({r.randint(-1, 1)}, 0, {max(1, v.dim()) - 1})",
    lambda r, v: ".detach()",
    lambda r, v: f".movedim(0, {max(1, v.dim()) - 1})",
    lambda r, v: ".flatten()",
    lambda r, v: ".squeeze()",
    lambda r, v: f".narrow(0, {r.randrange(2)}, 1)",
)


def _fitting(r: random.Random, v: Tensor, known: dict[str, Tensor]) -> str:
    """A tensor that broadcasts to `v`, or a number."""
    names = [n for n, t in known.items() if t.dim() <= v.dim() and _broadcasts(t, v)]
    return r.choice(names) if names and r.random() < 0.6 else str(r.choice(_NUMBERS))


def _broadcasts(t: Tensor, v: Tensor) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(t.shape), reversed(v.shape), strict=False))


def _computed(r: random.Random, name: str, v: Tensor, known: dict[str, Tensor]) -> str:
    other = _fitting(r, v, known)
    d = r.randrange(max(1, v.dim()))
    texts = [f"{name} * {other}", f"{name} + {other}", f"{name} * {other}", f"{name}.clone()", f"{name}.contiguous()"]
    texts += [f"{name}.sin()", f"{name}.relu()", f"{name}.softmax({d})", f"{name}.sum({d}, keepdim=True)"]
    texts += [f"torch.cat([{name}, {name}], {d})", f"{name}.flip({d})", f"{name}.cumsum({d})"]
    if v.dim() == 2:
        texts += [f"{name} @ {n}" for n, t in known.items() if t.dim() == 2 and t.shape[0] == v.shape[1]]
    if v.dim() == 3:
        of = {rank: {n: t.shape[1] for n, t in known.items() if t.dim() == rank} for rank in (2, 3)}
        texts += [f"torch.conv1d({name}, {n}[:, :, :1])" for n, channels in of[3].items() if channels == v.shape[1]]
        texts += [f"torch._C._nn.linear({name}, {n})" for n, features in of[2].items() if features == v.shape[2]]
        texts += [f"torch.bmm({name}, {name}.transpose(1, 2))"]
    if v.dim() == 4:
        texts += [f"torch.max_pool2d({name}, 1)", f"torch.conv2d({name}, {name}[:, :, :1, :1])"]
    return r.choice(texts)


def _written(r: random.Random, name: str, v: Tensor, known: dict[str, Tensor]) -> str:
    other, number = _fitting(r, v, known), r.choice(_NUMBERS)
    calls = [f"add_({other})", f"mul_({other})", "zero_()", f"fill_({number})", f"sub_({number})", "sin_()", "neg_()"]
    calls += [f"copy_({other})"] if not other.lstrip("-")[0].isdigit() else []
    return f"{name}.{r.choice(calls)}"


def random_program(seed: int, statements: int = 8) -> ViewProgram:
    """The program of a seed. Raises `Rejected` where PyTorch refuses all that was tried."""
    r = random.Random(seed)
    shape = r.choice(_SHAPES)
    program = ViewProgram(seed, shape, (r.choice(("plain", "plain", *_LAYOUTS[1:])), r.choice(_LAYOUTS)), (), ())
    module, (x, y) = program.module(), program.inputs()
    known: dict[str, Any] = {"x": x, "y": y, "w": module.w, "b": module.b}
    lines = random_lines(r, known, r.randint(3, statements))
    return replace(program, lines=lines, results=_results(r, known))


def random_lines(r: random.Random, known: dict[str, Tensor], count: int) -> tuple[str, ...]:
    """Statements on the tensors that are known, to which their values are added. Raises `Rejected`."""
    scope: dict[str, Any] = {"torch": torch, **known}
    lines: list[str] = []
    for wanted in range(count):
        for _ in range(4):
            line = _statement(r, f"v{wanted}", known)
            try:
                exec(line, scope)
            except (RuntimeError, IndexError, ValueError):
                continue
            lines.append(line)
            result = scope.get(f"v{wanted}")
            if isinstance(result, Tensor):
                if not 0 < result.numel() <= 200:
                    raise Rejected("a size out of bounds")
                known[f"v{wanted}"] = result
            break
    return tuple(lines)


def _statement(r: random.Random, target: str, known: dict[str, Tensor]) -> str:
    name = r.choice([*known][-3:] if r.random() < 0.6 else [*known])
    v, choice = known[name], r.random()
    if choice < 0.5:
        return f"{target} = {name}{r.choice(VIEWS)(r, v)}"
    if choice < 0.72:
        return f"{target} = {_computed(r, name, v, known)}"
    if choice < 0.9:
        return _written(r, name, v, known)
    return _written(r, f"{name}{r.choice(VIEWS)(r, v)}", v, {})  # a view that has no name


def _results(r: random.Random, known: dict[str, Tensor]) -> tuple[str, ...]:
    """Several values, most of which share memory where that is possible."""
    result = [n for n in known if n[0] == "v"] or [*known]
    first = r.choice(result)
    sharing = [n for n, t in known.items() if t.untyped_storage()._cdata == known[first].untyped_storage()._cdata]
    picked = [first, *(r.choice(sharing if r.random() < 0.7 else result) for _ in range(r.randint(1, 3)))]
    r.shuffle(picked)
    return tuple(f"{n}{r.choice(VIEWS)(r, known[n])}" if r.random() < 0.3 else n for n in picked)
