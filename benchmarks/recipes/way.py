"""Way: one of the three ways in which a recipe trains, and what it recorded on the way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.bound_step import BoundStep
from daceml_train.driver.function import CompiledGraph
from daceml_train.driver.module import state_of
from daceml_train.driver.step import TrainingStep

WAYS = ("eager", "optimize", "training_step")
STEPS = 5
Step = Callable[..., Tensor]


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small model with buffers; smooth, and no gradient is zero but for rounding, which so decides nothing."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def batch(number: int, rows: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(number)
    results = torch.randn(rows, 10, generator=generator, dtype=torch.float64).to(dtype)
    return results[:, :6].contiguous(), results[:, 6:].contiguous()


@dataclass
class Way:
    """How a recipe trains: `kind` is one of `WAYS`. `seen` holds what is compared, by name."""

    kind: str
    seen: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    """Steps that were asked for."""
    ran: int = 0
    """Programs that ran: forward passes of `optimize`, whole steps (or parts of a batch) of `training_step`."""
    _sources: list[Any] = field(default_factory=list)

    def compiled(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model as this way calls it."""
        if self.kind == "eager":
            return model
        result = dt.optimize(model, **options)
        self._sources.append(result)
        return result

    def trainer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor] = nn.functional.mse_loss,
        clip: Callable[[list[Tensor]], Any] | None = None,
        **options: Any,
    ) -> Step:
        """One step of training: a loop of PyTorch's own around the model, or a `training_step` with these options.

        `clip` is what the loop does for the options `clip_norm` and `clip_value`.
        """
        if self.kind == "training_step":
            step = dt.training_step(model, loss, optimizer, keep_gradients="micro_batches" not in options, **options)
            self._sources.append(step)
            return self._counted(step)
        called, scaler = self.compiled(model), options.get("scaler")

        def train(x: Any, *targets: Any) -> Tensor:
            optimizer.zero_grad()
            value = loss(called(x), *targets)
            (value if scaler is None else scaler.scale(value)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip([p for group in optimizer.param_groups for p in group["params"]])
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            return value.detach()

        return self._counted(train)

    def _counted(self, step: Step) -> Step:
        def counted(*arguments: Any) -> Tensor:
            self.calls += 1
            return step(*arguments)

        return counted

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the programs that run: what says that it is compiled, and runs as PyTorch does, is found by this.

        Python runs the first calls of a compiled graph; its later ones are counted where they run.
        """
        owner, name = (BoundStep, "run") if self.kind == "training_step" else (CompiledGraph, "forward")
        run = getattr(owner, name)
        graphs: dict[CompiledGraph, int] = {}

        def counted(program: Any, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(program, CompiledGraph):
                graphs.setdefault(program, program.native_runs)
            result = run(program, *arguments, **keywords)
            self.ran += result is not None
            return result

        setattr(owner, name, counted)
        try:
            yield
        finally:
            setattr(owner, name, run)
            self.ran += sum(graph.native_runs - before for graph, before in graphs.items())

    def note(self, name: str, value: Any) -> None:
        """Keep something that is compared: a tensor, a number, or what is equal or not."""
        number = sum(known.split(" #")[0] == name for known in self.seen)
        self.seen[f"{name} #{number}"] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

    def finish(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Keep parameters, buffers, gradients, flags and the optimizers' state."""
        for name, parameter in model.named_parameters():
            self.note(f"parameter {name}", parameter)
            self.note(f"flag {name}", parameter.requires_grad)
            self.note(f"gradient {name}", parameter.grad)
        for name, value in model.named_buffers():
            self.note(f"buffer {name}", value)
        for number, optimizer in enumerate(optimizers):
            self._state(f"optimizer {number}", optimizer.state_dict())

    def _state(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self._state(f"{name} {key}", entry)
        elif isinstance(value, list | tuple):
            for key, entry in enumerate(value):
                self._state(f"{name} {key}", entry)
        elif not callable(value):
            self.note(name, value)

    def reasons(self) -> list[str]:
        """Why something ran as PyTorch runs it."""
        found: list[str] = []
        for source in self._sources:
            states = [state_of(source)]
            if not isinstance(source, nn.Module):
                found += source.breaks
                states = [state_of(source.pieces)]
            backends = [state.backend for state in states if state is not None]
            found += [reason for backend in backends for reason in (*backend.breaks, *backend.graph_breaks)]
        begun = sum(source.taken_by_pytorch for source in self._sources if isinstance(source, TrainingStep))
        if not found and self.kind != "eager" and self.ran + begun < max(self.calls, 1):
            found.append(f"{self.ran} programs ran in {self.calls} steps, and nothing says why")
        return list(dict.fromkeys(found))


def train(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Five steps on batches of one size, then one of another."""
    step = way.trainer(model, optimizer, **options)
    for number in range(STEPS):
        way.note("loss", step(*batch(number, 6 if number < STEPS - 1 else 4)))
    way.finish(model, optimizer)
