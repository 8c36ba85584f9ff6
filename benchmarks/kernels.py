"""Times of generated kernels against PyTorch, eager and compiled, family by family.

    python -m benchmarks.kernels [--threads 2] [--only softmax] [--no-compile]

The three are run in turns, many times, and the medians compared: a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import generate
from tests.codegen import groups
from tests.codegen.running import bind, describe, kernel_of, layout

FOLDER = Path("build/benchmark-kernels")


@dataclass
class Family:
    """One line of the table: the body of the kernel, its operands, and the same in PyTorch."""

    name: str
    body: Callable
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    torch: Callable[..., object]
    updates: tuple[tuple[int, int], ...] = ()
    compiled: Callable[..., object] | None = None
    """What torch.compile gets, where it cannot take the eager form."""


def families() -> Iterator[Family]:
    """The families, with the sizes of ordinary models."""
    torch.manual_seed(0)
    yield from _normalizations()
    yield from _activations()
    yield from _batch_norms()
    yield from _updates()
    yield from _sums_and_moves()


def _normalizations() -> Iterator[Family]:
    """Layer norm and softmax, and their derivatives."""
    r, e = torch.randn, torch.empty
    x, g, w, b = r(1024, 1024), r(1024, 1024), r(1024), r(1024)
    mean, rstd = x.mean(1, True), (x.var(1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    yield Family(
        "layer_norm [1024x1024]",
        groups.layer_norm,
        [x, w, b],
        [e(1024, 1024), e(1024, 1), e(1024, 1)],
        lambda x, w, b: torch.native_layer_norm(x, (1024,), w, b, 1e-5),
    )
    yield Family(
        "layer_norm_backward",
        groups.layer_norm_backward,
        [g, x, w, mean, rstd],
        [e(1024, 1024), e(1024), e(1024)],
        lambda g, x, w, m, s: torch.ops.aten.native_layer_norm_backward(g, x, (1024,), m, s, w, w, (True, True, True)),
    )
    yield Family("softmax [1024x1024]", groups.softmax, [x], [e(1024, 1024)], lambda x: x.softmax(1))
    masked = x.masked_fill(torch.rand(1024, 1024) < 0.3, -torch.inf)
    yield Family("softmax, 30 % -inf", groups.softmax, [masked], [e(1024, 1024)], lambda x: x.softmax(1))
    y = x.softmax(1)
    yield Family(
        "softmax_backward",
        groups.softmax_backward,
        [g, y],
        [e(1024, 1024)],
        lambda g, y: torch.ops.aten._softmax_backward_data(g, y, 1, torch.float32),
    )


def _activations() -> Iterator[Family]:
    """A bias and an activation, and their derivatives."""
    r, e = torch.randn, torch.empty
    x4, g4, b4 = r(1024, 4096), r(1024, 4096), r(4096)
    yield Family(
        "bias+gelu_tanh [1024x4096]",
        groups.bias_gelu,
        [x4, b4],
        [e(1024, 4096)],
        lambda x, b: F.gelu(x + b, approximate="tanh"),
    )

    def gelu_backward(kind):
        def run(g, x, b):
            dx = torch.ops.aten.gelu_backward(g, x + b, approximate=kind)
            return dx, dx.sum(0)

        return run

    yield Family(
        "bias+gelu_tanh backward",
        groups.bias_gelu_backward,
        [g4, x4, b4],
        [e(1024, 4096), e(4096)],
        gelu_backward("tanh"),
    )
    yield Family(
        "bias+gelu_erf backward",
        groups.bias_gelu_erf_backward,
        [g4, x4, b4],
        [e(1024, 4096), e(4096)],
        gelu_backward("none"),
    )


def _batch_norms() -> Iterator[Family]:
    """Batch norm and ReLU, in both memory layouts."""
    r, e = torch.randn, torch.empty
    image, gi, wc, bc, run = r(8, 64, 48, 48), r(8, 64, 48, 48), r(64), r(64), torch.zeros(64)
    stats = [image.mean((0, 2, 3)), (image.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()]

    def batch_norm(x, w, b, rm):
        y, m, s = torch.native_batch_norm(x, w, b, rm, torch.ones(64), True, 0.1, 1e-5)
        return y.relu(), m, s

    def batch_norm_backward(g, y, x, w, m, s):
        g = torch.where(y <= 0, 0.0, g)
        return torch.ops.aten.native_batch_norm_backward(g, x, w, None, None, m, s, True, 1e-5, (True, True, True))

    small = [e(64) for _ in range(3)]
    yield Family(
        "batch_norm+relu [8,64,48,48]",
        groups.batch_norm(1),
        [image, wc, bc, run],
        [torch.empty_like(image), *small],
        batch_norm,
    )
    yield Family(
        "batch_norm+relu backward",
        groups.batch_norm_backward(1),
        [gi, image, image, wc, *stats],
        [torch.empty_like(image), *small[:2]],
        batch_norm_backward,
    )
    last = [t.contiguous(memory_format=torch.channels_last) for t in (image, gi)]
    yield Family(
        "batch_norm+relu, channels last",
        groups.batch_norm(1),
        [last[0], wc, bc, run],
        [torch.empty_like(last[0]), *small],
        batch_norm,
    )
    yield Family(
        "  its backward",
        groups.batch_norm_backward(1),
        [last[1], last[0], last[0], wc, *stats],
        [torch.empty_like(last[0]), *small[:2]],
        batch_norm_backward,
    )


def _updates() -> Iterator[Family]:
    """An optimizer's update."""
    r = torch.randn
    p, gr, m, v = (r(5_000_000).abs() for _ in range(4))
    steps = torch.tensor(3.0)

    def adam(p, g, m, v, step):
        torch._fused_adamw_(
            [p],
            [g],
            [m],
            [v],
            [],
            [step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def adam_in_steps(p, g, m, v, step):
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(1e-3 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))

    yield Family(
        "adam, 5 M", groups.adam, [p, gr, m, v, steps], [p, m, v], adam, ((0, 0), (1, 2), (2, 3)), adam_in_steps
    )


def _sums_and_moves() -> Iterator[Family]:
    """Sums, a loss, dropout, and arrays in another order."""
    r, e = torch.randn, torch.empty
    x = r(1024, 1024)
    yield Family("column sum [8192x1024]", groups.column_sum, [r(8192, 1024)], [e(1024)], lambda x: x.sum(0))
    yield Family("column sum [1024x1024]", groups.column_sum, [x], [e(1024)], lambda x: x.sum(0))
    yield Family("column sum [512x30522]", groups.column_sum, [r(512, 30522)], [e(30522)], lambda x: x.sum(0))
    yield Family(
        "residual add [4 M]", lambda a, b: a + b, [r(2048, 2048), r(2048, 2048)], [e(2048, 2048)], lambda a, b: a + b
    )
    yield Family(
        "mean and difference [4 M]",
        groups.full_mean,
        [r(2048, 2048)],
        [e(()), e(2048, 2048)],
        lambda x: (x.mean(), x - x.mean()),
    )
    target = torch.randint(0, 1024, (1024,))

    def cross_entropy(x, t):
        y = torch.log_softmax(x, 1)
        return F.nll_loss(y, t), (y.exp() - F.one_hot(t, 1024)) / 64

    yield Family("cross_entropy, both ways", groups.cross_entropy, [x, target], [e(()), e(1024, 1024)], cross_entropy)
    yield Family(
        "dropout [4 M]",
        groups.dropout,
        [r(2048, 2048), torch.tensor(1234)],
        [e(2048, 2048)],
        lambda x, s: F.dropout(x, 0.25),
    )
    yield Family(
        "transpose [2048x2048]",
        lambda a: a.permute((1, 0)) + 1.0,
        [r(2048, 2048)],
        [e(2048, 2048)],
        lambda a: (
            a.t()
            .add(
                1.0,
            )
            .contiguous()
        ),
    )
    heads = r(8, 128, 12, 64)
    yield Family(
        "heads [8,128,12,64] to front",
        lambda a: a.permute((0, 2, 1, 3)) * 0.125,
        [heads],
        [e(8, 12, 128, 64)],
        lambda a: (a.permute(0, 2, 1, 3) * 0.125).contiguous(),
    )


def measure(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median milliseconds of each call, run in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, kept in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            kept.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1.0, help="per family")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"{'ms, median':32}{'ours':>8}{'eager':>8}{'ratio':>7}{'compile':>9}{'ratio':>7}{'generate':>10}{'g++':>6}")
    for family in families():
        if options.only not in family.name:
            continue
        kernel = kernel_of(family.body, *map(describe, family.inputs))
        kernel = type(kernel)(kernel.arguments, kernel.statements, kernel.yields, family.updates)
        start = time.perf_counter()
        code = generate(kernel, [*map(layout, family.inputs)], [*map(layout, family.outputs)])
        code.source  # noqa: B018
        result = time.perf_counter()
        path = compile_kernels([code], FOLDER)[code.key]
        built = time.perf_counter()
        ours = bind(code, load(path, code.key), kernel, family.inputs, family.outputs, threads=options.threads)
        calls: list[Callable[[], object]] = [ours, lambda f=family: f.torch(*f.inputs)]
        if not options.no_compile:
            compiled = torch.compile(family.compiled or family.torch, dynamic=False)
            calls.append(lambda f=family, c=compiled: c(*f.inputs))
        with torch.no_grad():
            times = measure(calls, options.seconds)
        row = f"{family.name:32}{times[0]:8.3f}{times[1]:8.3f}{times[0] / times[1]:7.2f}"
        row += f"{times[2]:9.3f}{times[0] / times[2]:7.2f}" if len(times) > 2 else " " * 16
        print(f"{row}{result - start:10.3f}{built - result:6.2f}", flush=True)


if __name__ == "__main__":
    main()
