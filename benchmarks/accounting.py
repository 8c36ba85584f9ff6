"""The bytes of one training step, in eager execution and after each level of the pipeline; nothing is executed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.networks import Network
from benchmarks.networks.transformer import Block
from daceml_train.analysis.traffic import Traffic, traffic
from daceml_train.autodiff.reverse import differentiate
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.capture.eager_traffic import eager_traffic, fake
from daceml_train.graph.graph import Graph, Role
from daceml_train.passes.base import LEVELS, without_dead_code
from daceml_train.passes.pipeline import Pipeline, Step

CAPTURED = "captured"
"""The name of the first stage: one kernel or library call per operator, gradients and update included."""


@dataclass
class Account:
    """Bytes in eager execution and by stage; `passes` are (level, name, bytes after it, seconds).

    `eager_by_operator` and `ours_by_operator` are sorted, the largest first.
    """

    title: str
    eager: int
    stages: dict[str, int]
    operators: int
    eager_kernels: int
    kernels: int
    passes: list[tuple[str, str, int, float]] = field(default_factory=list)
    eager_by_operator: dict[str, int] = field(default_factory=dict)
    ours_by_operator: dict[str, int] = field(default_factory=dict)

    @property
    def ours(self) -> int:
        """Bytes after the last level."""
        return list(self.stages.values())[-1]

    @property
    def share(self) -> float:
        """What is left of eager's bytes."""
        return self.ours / self.eager

    @property
    def grown(self) -> list[str]:
        """Levels after which there are more bytes than before."""
        pairs = zip(list(self.stages.items())[:-1], list(self.stages.items())[1:], strict=True)
        return [name for (_, before), (name, after) in pairs if after > before]


def training_account(network: Network, pipeline: Pipeline = dt.TRAINING, small: bool = False) -> Account:
    """One training step of a network."""
    eager = eager_step(network, small)
    torch._dynamo.reset()
    problem = network.build(small=small)
    step = dt.training_step(problem.model, problem.loss, problem.optimizer)
    plain = step.graph(problem.inputs, problem.targets)
    torch._dynamo.reset()
    step = dt.training_step(problem.model, problem.loss, problem.optimizer)
    return account(network.title, eager, plain, step.graph(problem.inputs, problem.targets, forward=pipeline), pipeline)


def eager_step(network: Network, small: bool = False) -> Traffic:
    """A step in eager execution; it runs only if gradients are sparse, whose sizes depend on numbers."""
    with fake():
        problem = network.build(small=small)
        if not any(getattr(module, "sparse", False) for module in problem.model.modules()):
            problem.step()
            return eager_traffic(problem.step)
    problem = network.build(small=small)
    problem.step()
    return eager_traffic(problem.step)


def encoder_layer_account(pipeline: Pipeline = dt.TRAINING, batch: int = 8, length: int = 512) -> Account:
    """Forward and backward pass of one encoder layer of BERT-large, with dropout, from its input to all gradients.

    The figure to beat is the 22.91 % of Ivanov et al., Data Movement Is All You Need, 2021.
    """

    def layer() -> tuple[nn.Module, Tensor, Tensor]:
        x = torch.randn(batch, length, 1024).requires_grad_()
        return Block(1024, 16, before=False, fused=False, dropout=0.1), x, torch.randn(batch, length, 1024)

    def run(module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        x.grad = None
        module.zero_grad()
        module(x).backward(gradient)

    with fake():
        results = layer()
        run(*results)
        eager = eager_traffic(lambda: run(*results))
    module, x, _ = layer()
    captured = captured_module(module, x)

    def joint(levels: tuple[str, ...]) -> Graph:
        graph = pipeline.run(captured.graph, levels).copy()
        (y,) = graph.outputs
        seed = graph.input("grad_y", graph.tensors[y], Role.cotangent)
        floating = [n for n, i in graph.inputs.items() if i.tensor.dtype.is_float and n != "grad_y"]
        found = differentiate(graph, {y: seed}, floating)
        graph.outputs += [g.name for g in found.values() if g is not None]
        return without_dead_code(graph)

    title = f"BERT-large encoder layer, {batch} x {length}, forward and backward pass"
    return account(title, eager, joint(()), joint(("forward",)), pipeline)


def captured_module(module: nn.Module, *inputs: Tensor) -> Captured:
    """The forward pass of a module as TorchDynamo captures it."""
    found: list[Captured] = []

    def collect(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found.append(capture(graph, examples))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(module, backend=collect, fullgraph=True)(*inputs)
    return found[0]


def account(title: str, eager: Traffic, plain: Graph, graph: Graph, pipeline: Pipeline) -> Account:
    """Run the levels after `forward` on a joint graph and record the bytes; `plain` had no pass applied."""
    stages = {CAPTURED: _bytes(traffic(plain)), "forward": _bytes(traffic(graph))}
    passes: list[tuple[str, str, int, float]] = []

    def watch(step: Step) -> None:
        passes.append((step.level, str(step.transformation), int(step.bytes_after), step.seconds))

    operators = len(graph.nodes)
    for level in LEVELS[1:]:
        graph = pipeline.run(graph, (level,), watch)
        stages[level] = _bytes(traffic(graph))
    final = traffic(graph)
    moving = [entry for entry in final.all if entry.bytes]
    return Account(
        title,
        _bytes(eager),
        stages,
        operators,
        len(eager.entries),
        len(moving),
        passes,
        _largest(eager),
        _largest(final),
    )


def _bytes(moved: Traffic) -> int:
    return int(moved.bytes)


def _largest(moved: Traffic, count: int = 12) -> dict[str, int]:
    sizes = {label: int(size) for label, size in moved.by_label().items() if size}
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1])[:count])


def timed(function: Callable[[], Account]) -> tuple[Account, float]:
    """An account and the seconds it took."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start
