"""Agreement: a compiled step's loss, gradients, buffers and update are as near to float64 as eager execution's are.

    python -m benchmarks.agreement [--full] [--mixed] [NETWORK...]

compares both ways of compiling with eager execution on the networks' small sizes. Exits with 1 where one disagrees.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.networks import NETWORKS, Network, Problem
from benchmarks.noise import RUNS, Rounding
from daceml_train.transformations.intra_operator.mixed_precision import MixedPrecision

FACTOR, FLOOR = 10.0, 2e-5
"""An error may be this many times eager's error against float64, or this large relative to the exact value. Of eager
execution's layouts the worse one counts: for gradients in front of BatchNorm and ReLU6 they differ by more than ten
times, for no reason but another order of sums. Where that does not suffice, eager runs with noise count, too."""


class Disagreement(Exception):
    """The compiled step computes something else."""


def agreement(network: Network, small: bool = False) -> float:
    """The largest error relative to what is allowed, without dropout. Raises `Disagreement` above 1."""
    build = functools.partial(network.build, small=small, dropout=False)
    exact = _gradients(build(double=True))
    eager = [_gradients(build(channels_last=last)) for last in ((False, True) if network.images else (False,))]
    whole = _step_gradients(build())
    drop_in = build()
    module = _gradients(Problem(dt.optimize(drop_in.model), *_rest(drop_in)))
    typical = float(torch.stack([g.norm() for g in exact.values()]).median())
    worst, noisy = 0.0, False
    for name, value in exact.items():
        scale = max(float(value.norm()), 1e-3 * typical)
        for path, found in (("training_step", whole), ("optimize", module)):
            error = float((found[name] - value).norm()) / scale
            while not error <= (allowed := FACTOR * _furthest(eager, name, value) / scale + FLOOR):
                if noisy:
                    raise Disagreement(f"{name} by {path}: relative error {error:.1e}, allowed {allowed:.1e}")
                eager += [_noisy_gradients(build(), seed) for seed in range(RUNS)]
                noisy = True
            worst = max(worst, error / allowed)
    return max(worst, _update(build))


def _furthest(found: Sequence[dict[str, Tensor]], name: str, value: Tensor) -> float:
    """The largest distance of a tensor from its exact value."""
    return max(float((tensors[name] - value).norm()) for tensors in found)


def _noisy_gradients(problem: Problem, seed: int) -> dict[str, Tensor]:
    """Eager execution's with noise in the last bit of results and terms.

    It shows which gradients depend on decisions, such as the sign that a ReLU sees or the largest element of a pooling
    window, that rounding makes: one element in ten million moves a gradient by 3e-3, or does not.
    """
    with Rounding(seed, terms=True):
        return _gradients(problem)


def _rest(problem: Problem) -> tuple[object, ...]:
    return problem.inputs, problem.targets, problem.loss, problem.optimizer


def _gradients(problem: Problem, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Loss, gradients and buffers, named as in `model` (or the problem's)."""
    loss = problem.objective()
    loss.backward()
    return {"loss": loss.detach().double()} | _named(model or problem.model)


def _step_gradients(problem: Problem, **options: Any) -> dict[str, Tensor]:
    step = dt.training_step(problem.model, problem.loss, problem.optimizer, keep_gradients=True, **options)
    return {"loss": step(problem.inputs, problem.targets).double()} | _named(problem.model)


def _named(model: nn.Module) -> dict[str, Tensor]:
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    dense = {n: (g.to_dense() if g.is_sparse else g).double() for n, g in gradients.items()}
    return dense | {n: b.double() for n, b in model.named_buffers()}


def _update(build: Callable[[], Problem]) -> float:
    """The same for parameters after the second step, against PyTorch's update with the gradients of compiled steps."""
    ours, theirs = build(), build()
    step = dt.training_step(ours.model, ours.loss, ours.optimizer, keep_gradients=True)
    pairs = list(zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True))
    before = [copy.deepcopy(p.detach()) for p in theirs.model.parameters()]
    for _ in range(2):
        step(ours.inputs, ours.targets)
        for (_, own), their in pairs:
            their.grad = None if own.grad is None else own.grad.clone()
        theirs.optimizer.step()
    worst = 0.0
    for ((name, own), their), start in zip(pairs, before, strict=True):
        moved = float((their.detach() - start).norm())
        error = float((own - their).detach().norm()) / (moved + 1e-6 * float(start.norm()) + 1e-30)
        if not error <= 1e-3:
            raise Disagreement(f"update of {name}: off by {error:.1e} of what it moves")
        worst = max(worst, error / 1e-3)
    return worst


MIXED_FACTOR = 1.5
"""How many times as far from float64 as under `torch.autocast` gradients in mixed precision may be."""


def mixed_agreement(network: Network, small: bool = False) -> float:
    """Errors of loss, gradients and buffers in bfloat16 as a share of what is allowed; raises `Disagreement` above 1.

    The measure is the root mean square, over all tensors, of the relative error of each.
    """
    build = functools.partial(network.build, small=small, dropout=False)
    exact = _gradients(build(double=True))
    typical = float(torch.stack([g.norm() for g in exact.values()]).median())

    def error(found: dict[str, Tensor]) -> float:
        squares = [((found[n] - g).norm() / max(float(g.norm()), 1e-3 * typical)) ** 2 for n, g in exact.items()]
        return float(torch.stack(squares).mean().sqrt())

    cast = build()
    plain, autocast = error(_gradients(build())), error(_gradients(cast.autocast(), cast.model))
    pipeline = dt.MIXED_PRECISION.with_options(MixedPrecision, least=1) if small else dt.MIXED_PRECISION
    ours, allowed = error(_step_gradients(build(), pipeline=pipeline)), MIXED_FACTOR * autocast + FACTOR * plain + FLOOR
    if not ours <= allowed:
        raise Disagreement(f"mixed precision: error {ours:.1e}, under autocast {autocast:.1e}, in float32 {plain:.1e}")
    return ours / allowed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 1 if a network disagrees or does not compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="in the sizes that are measured")
    parser.add_argument("--mixed", action="store_true", help="in bfloat16 and float32, beside torch.autocast")
    options = parser.parse_args(arguments)
    compare = mixed_agreement if options.mixed else agreement
    if unknown := set(options.networks) - set(NETWORKS):
        parser.error(f"no network is called {', '.join(sorted(unknown))}; known: {', '.join(NETWORKS)}")
    failed = 0
    for name in options.networks or NETWORKS:
        try:
            print(
                f"{name:16} agrees: {compare(NETWORKS[name], small=not options.full):.3f} of what is allowed",
                flush=True,
            )
        except Exception as error:  # the next networks are still informative
            failed = 1
            print(f"{name:16} {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
