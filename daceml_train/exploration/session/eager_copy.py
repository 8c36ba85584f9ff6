"""PyTorch's results of one call on copies of model, loss and optimizer, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.exploration.session.program import DRAWN, accumulated
from daceml_train.exploration.session.subject import NORM, Subject, held_modules
from daceml_train.training.gradients import SCALER
from daceml_train.training.optimizers import SCALARS

Named = dict[tuple[str, str], torch.Tensor]
"""(kind, name) -> tensor; kinds are `result`, `gradient`, `update`, `state` and `buffer`."""
Seeded = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Results of a module, each with its cotangent."""


class EagerCopy:
    """Copies of a subject's model, loss, optimizer and inputs, in float64 if `wide`, images channels-last if asked.

    A run trains the copy; the user's own objects stay as they are.
    """

    def __init__(self, subject: Subject, wide: bool = False, channels_last: bool = False) -> None:
        self.subject = subject
        self._wide, self._last = wide, channels_last
        memo: dict[int, Any] = {}
        self.inputs = pytree.tree_map(lambda x: self._input(x, memo), subject.inputs)
        self.model, self.loss, self.optimizer = copy.deepcopy((subject.model, subject.loss, subject.optimizer), memo)
        for path, held in held_modules(self.model, self.loss).items():
            held.training = subject.training.get(path, held.training)
        self.scaler = copy.deepcopy(subject.treatment.scaler)
        self.norm: torch.Tensor | None = None
        """The norm of the gradients before clipping."""
        for module in (self.model, self.loss):
            if isinstance(module, torch.nn.Module):
                if wide:
                    module.double()
                if channels_last:
                    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if wide and self.optimizer is not None:
            for state in self.optimizer.state.values():
                wider = {k: v.double() for k, v in state.items() if isinstance(v, torch.Tensor) and k not in SCALARS}
                state.update(wider)
        self._memo = memo

    def _input(self, leaf: Any, memo: dict[int, Any]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        copied = leaf.detach().clone(memory_format=torch.preserve_format)
        if self._wide and copied.is_floating_point():
            copied = copied.double()
        if self._last and copied.ndim == 4:
            copied = copied.contiguous(memory_format=torch.channels_last)
        memo[id(leaf)] = copied.requires_grad_(leaf.requires_grad)
        return memo[id(leaf)]

    @property
    def _held(self) -> dict[str, torch.Tensor]:
        """The copies' parameters and buffers under the paths that inputs of the graph have."""
        tensors: dict[str, torch.Tensor] = {}
        for prefix, module in (("", self.model), ("loss.", self.loss)):
            if isinstance(module, torch.nn.Module):
                named = [
                    *module.named_parameters(remove_duplicate=False),
                    *module.named_buffers(remove_duplicate=False),
                ]
                tensors |= {prefix + name: tensor for name, tensor in named}
        return tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """Captured input -> the copy's tensor, if known."""
        tensors = self._held
        found = {
            n: tensors.get(self.subject.path(n), self._memo.get(id(t))) for n, t in self.subject.seen.tensors.items()
        }
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def forward(self) -> list[torch.Tensor]:
        """The loss, or the module's results, flat."""
        if self.subject.kind == "module":
            return [leaf for leaf in pytree.tree_leaves(self.model(*self.inputs)) if isinstance(leaf, torch.Tensor)]
        first, *targets = self.inputs
        if isinstance(first, Mapping):
            output = self.model(**first)
        else:
            output = self.model(*first) if isinstance(first, tuple | list) else self.model(first)
        if self.loss is not None:
            return [self.loss(output, *targets)]
        return [output["loss"] if isinstance(output, Mapping) else output.loss]

    def step(self, seeds: Mapping[int, torch.Tensor]) -> Callable[[], object]:
        """One training step as a user writes it, for measurement; `seeds` are cotangents of results."""

        def run() -> None:
            if self.subject.treatment.micro_batches == 1:
                for parameter in [p for p in self.model.parameters() if p.grad is not None]:
                    parameter.grad = None
            results = self.forward()
            if self.subject.kind == "module":
                self._backward_from(self._measured(results, seeds))
            else:
                self._backward(results[0])
            if self.optimizer is not None:
                self._update()

        return run

    def _measured(self, results: Sequence[torch.Tensor], seeds: Mapping[int, torch.Tensor]) -> Seeded:
        """Results and their cotangents; ones for parts of memory that the graph returns as a whole."""
        try:
            placed = self._placed(results)
        except Unsupported:
            return [(result, torch.ones_like(result)) for result in results]
        return [(placed[i], seed) for i, seed in seeds.items()]

    def _placed(self, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Graph output -> the module's result; raises `Unsupported` where the results are only parts of an output.

        A tensor that is returned twice, or an input that is returned as it is, is no output of its own.
        """
        captured = self.subject.seen.captured
        given = {id(tensor) for tensor in (*pytree.tree_leaves(self.inputs), *self._held.values())}
        own = list({id(result): result for result in results if id(result) not in given}.values())
        sources = [s for s in captured.outputs if s.kind == "graph" or s.view is not None]
        pairs = zip(own, sources, strict=False)
        placed = {s.index: result for result, s in pairs if s.kind == "graph" and s.view is None}
        if len(own) != len(sources) or len(placed) != len(captured.graph.outputs):
            raise Unsupported("the module returns parts of a tensor, and not the tensor that its graph computes")
        return placed

    def _backward_from(self, seeded: Seeded) -> None:
        carrying = [(result, seed.to(result.dtype)) for result, seed in seeded if result.requires_grad]
        torch.autograd.backward([result for result, _ in carrying], [seed for _, seed in carrying])

    def _backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss, or of its share of a batch in parts, scaled where there is a scaler."""
        treatment = self.subject.treatment
        if treatment.micro_batches != 1:
            loss = loss * treatment.share
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def _update(self) -> None:
        """Unscale, clip, and update as a user's loop does."""
        self._treat()
        self._step()

    def _step(self) -> None:
        assert self.optimizer is not None
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _leave(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients that earlier parts of the batch left."""
        if self.subject.treatment.micro_batches != 1:
            for trained in self.subject.trained:
                tensor = tensors[trained.parameter]
                left = accumulated(self.subject.path(trained.parameter), self.subject.seen.tensors[trained.parameter])
                tensor.grad = left.to(tensor.dtype)

    def _treat(self) -> None:
        """Apply the gradient settings before the update."""
        assert self.optimizer is not None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.norm = self.subject.treatment.clipping.apply([p for g in self.optimizer.param_groups for p in g["params"]])

    def results(self, seeds: Mapping[int, torch.Tensor], rate: float | None = None) -> Named:
        """All tensors in which a session's program is compared. `rate` replaces all learning rates."""
        subject = self.subject
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(DRAWN)
            results = self.forward()
            by_place = self._placed(results) if subject.kind == "module" else {0: results[0]}
            found: Named = {
                ("result", subject.labels[i] if subject.kind == "module" else "loss"): value.detach().clone()
                for i, value in by_place.items()
            }
            tensors = self.tensors()
            wanted = {n: t for n, t in tensors.items() if t.requires_grad and t.is_leaf}
            if subject.kind == "module":
                self._backward_from([(by_place[i], seed) for i, seed in seeds.items()])
            else:
                self._leave(tensors)
                self._backward(results[0])
            if self.optimizer is not None:
                self._treat()
        if self.norm is not None:
            found["result", NORM] = self.norm.detach().clone()
        for name, tensor in wanted.items():
            if tensor.grad is not None:
                gradient = tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad
                found["gradient", subject.path(name)] = gradient.detach().clone()
        found |= {("buffer", subject.path(n)): tensors[n].clone() for n in subject.captured.writes if n in tensors}
        if self.optimizer is not None:
            found |= self._updated(tensors, rate)
        return found

    def _updated(self, tensors: Mapping[str, torch.Tensor], rate: float | None) -> Named:
        """The parameters and the optimizer state after the update."""
        assert self.optimizer is not None
        before = {t.parameter: tensors[t.parameter].detach().clone() for t in self.subject.trained}
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self._step()
        found: Named = {}
        if self.scaler is not None and self.scaler.is_enabled():
            found |= {("state", f"{n} of the scaler"): getattr(self.scaler, n).clone() for n in SCALER}
        for name, old in before.items():
            path, parameter = self.subject.path(name), tensors[name]
            found["update", path] = parameter.detach() - old
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    found["state", f"{key} of {path}"] = value.detach().clone()
        return found
