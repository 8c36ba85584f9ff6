"""Gradients that are what is left of terms that cancel, in front of batch normalizations: ours, eager's, noise.

python -m benchmarks.cancellation prints, for each model, the gradient of which the ratio of our error to eager's is
largest among those above 1e-5, then the error of BatchNorm's own gradient in units of its terms' rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from benchmarks.fuzz import Case, Layer, checking
from benchmarks.fuzz.checking import Values

CASES = (
    Case(
        1034,
        (
            Layer("h = F.prelu(h, self.p{n}.flatten()[:1])", ("self.p{n} = nn.Parameter(torch.randn([4]) * 0.5)",)),
            Layer("h = self.n{n}(F.relu(h))", ("self.n{n} = nn.RMSNorm(4)",)),
            Layer("h = h / (self.p{n}.exp() + 1)", ("self.p{n} = nn.Parameter(torch.randn([1, 1]) * 0.5)",)),
            Layer("h = self.n{n}(h)", ("self.n{n} = nn.BatchNorm1d(3, affine=False, track_running_stats=False)",)),
        ),
        (3, 4),
        optimizer="Adam(p, lr=1e-3, eps=1e-3)",
        sizes=(3, 2),
    ),
    Case(
        3010,
        (
            Layer("h = h / (self.p{n}.exp() + 1)", ("self.p{n} = nn.Parameter(torch.randn([6, 1]) * 0.5)",)),
            Layer("h = h + self.l{n}(h).sum(-1, keepdim=True)", ("self.l{n} = nn.Linear(6, 4)",)),
            Layer("h = h - (F.softplus(h))"),
            Layer("h = self.n{n}(h)", ("self.n{n} = nn.BatchNorm2d(2)",)),
        ),
        (2, 6, 6),
        loss="cross_entropy",
        sizes=(2, 4),
        threads=2,
    ),
    Case(
        3001,
        (
            Layer("h = self.p{n} - h", ("self.p{n} = nn.Parameter(torch.randn([1]) * 0.5)",)),
            Layer("h = torch.rsqrt(h.square() + 0.5)"),
            Layer("h = h + (h.exp().clamp(max=3.0))"),
            Layer("h = self.n{n}(h)", ("self.n{n} = nn.BatchNorm1d(6)",)),
        ),
        (6,),
        loss="smooth_l1_loss",
        optimizer="Adam(p, lr=1e-3, eps=1e-3)",
        sizes=(2, 4),
    ),
)


def worst(found: Values, eager: Values, noisy: Sequence[Values], exact: Values) -> tuple[float, str]:
    """The ratio and a line on the gradient that looks worst beside one eager run."""
    largest = max(float(v.abs().max()) for n, v in exact.items() if "gradient" in n)
    lines = [(0.0, "nothing above 1e-5 of the largest")]
    for name, value in found.items():
        if "gradient" not in name:
            continue
        size = float(exact[name].abs().max())
        scale = max(size, 3e-2 * largest)
        runs = (value, eager[name], *(run[name] for run in noisy))
        errors = [float((t.double() - exact[name].double()).abs().max()) / scale for t in runs]
        text = f"{name}: {size:.1e} of {largest:.1e}; ours {errors[0]:.1e}, eager {errors[1]:.1e}, with noise "
        if errors[0] > checking.FLOOR:
            lines.append((errors[0] / errors[1], text + ", ".join(f"{e:.1e}" for e in errors[2:])))
    return max(lines)


def models() -> None:
    """Print a line for each model and way of training it."""
    judged = checking.wrong_in

    def show(found: Values, eager: Values, noisy: Sequence[Values], exact: Values) -> str:
        ratio, line = worst(found, eager, noisy, exact)
        verdict = judged(found, eager, noisy, exact) or "not wrong"
        print(f"  {ratio:5.1f} times eager: {line}: {verdict}")
        return ""

    checking.wrong_in = show
    try:
        for case in CASES:
            print(f"model {case.seed}")
            checking.check(case)
    finally:
        checking.wrong_in = judged


def batch_norm() -> None:
    """Print the error of the gradient of BatchNorm's input, by length: PyTorch's, and of our formula in float."""
    torch.manual_seed(0)
    for rows in (3, 4, 8, 32, 144):
        errors = []
        for _ in range(200):
            x, g = torch.randn(rows, 16) * 2 + 1, torch.randn(rows, 16)
            wide, narrow = x.double().requires_grad_(), x.clone().requires_grad_()
            F.batch_norm(wide, None, None, training=True).backward(g.double())
            F.batch_norm(narrow, None, None, training=True).backward(g)
            unit = g.abs().amax(0) / x.std(0, unbiased=False) * 2.0**-24
            runs = (narrow.grad, formula(x, g, torch.float32), formula(x, g, torch.float64))
            errors.append([float(((r.double() - wide.grad).abs() / unit).max()) for r in runs])
        mean = torch.tensor(errors).mean(0).tolist()
        print(f"{rows:4} rows: PyTorch {mean[0]:.2f}, sums in float {mean[1]:.2f}, sums in double {mean[2]:.2f}")


def formula(x: torch.Tensor, g: torch.Tensor, sums: torch.dtype) -> torch.Tensor:
    """What our kernels compute, with sums in another type."""

    def mean(t: torch.Tensor) -> torch.Tensor:
        return t.to(sums).mean(0).to(t.dtype)

    centered = x - mean(x)
    rstd = (mean(centered.square()) + 1e-5).rsqrt()
    normal = centered * rstd
    return rstd * (g - mean(g) - normal * mean(g * normal))


if __name__ == "__main__":
    models()
    batch_norm()
