"""A training step in pieces: PyTorch's autograd and optimizer around the compiled model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from daceml_train import logs
from daceml_train.driver.checking import check_loss, loss_of
from daceml_train.driver.clipped import Clipped
from daceml_train.driver.distribution import reduce_in_pieces, rows_of
from daceml_train.driver.faster import SLOWER, Faster
from daceml_train.driver.module import optimized, state_of
from daceml_train.driver.optimizer_updates import update_for
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.frontends.torch.dynamo.tracing import describe


class InPieces(Clipped):
    """What a `TrainingStep` does where it cannot be one program."""

    model: torch.nn.Module
    loss: Callable[..., torch.Tensor] | None
    options: Settings
    keep_gradients: bool
    gradient_norm: torch.Tensor | None
    records: list[Record]
    breaks: list[str]
    pieces: torch.nn.Module | None
    _in_pieces: dict[Any, str]
    _worked: str
    _warned: set[str]
    faster: Faster
    fixed: bool
    _overwritten: Sequence[int] = ()
    """The parameters that the model has changed in the forward pass of a step in pieces, by number."""

    def _modules(self) -> list[torch.nn.Module]:
        """All modules of model and loss."""
        roots = [m for m in (self.model, self.loss) if isinstance(m, torch.nn.Module)]
        return list({id(m): m for root in roots for m in root.modules()}.values())

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters of model, loss and optimizer."""
        found = [p for m in self._modules() for p in m._parameters.values() if p is not None]
        found += [p for group in self.optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in found}.values())

    def _run_in_pieces(self, key: Any, inputs: Any, targets: Sequence[Any]) -> torch.Tensor:
        """The same step with PyTorch's autograd and optimizer around the compiled model, or without it if that is
        faster.
        """
        compiled, start = self.fixed or self.faster.takes_pieces(), time.perf_counter()
        loss = self._in_pytorch(key, inputs, targets, compiled)
        if not self.fixed and self.faster.ran(compiled, time.perf_counter() - start):
            self.breaks.append(SLOWER)
            logs.event(logs.BREAKS, SLOWER)
        self._worked = self._worked or describe([inputs, *targets])
        self._warn(key)
        return loss

    def _in_pytorch(self, key: Any, inputs: Any, targets: Sequence[Any], compiled: bool = False) -> torch.Tensor:
        """The loss of a step by PyTorch's autograd, of the compiled model or of the model itself."""
        self._drop_gradients()
        return self._train_in_pieces(self._loss_in_pieces(key, inputs, targets, compiled), inputs, targets)

    def _drop_gradients(self) -> None:
        """Drop old gradients: before the forward pass, whose own calls of backward() add to the step's."""
        for parameter in self._parameters():
            parameter.grad = None

    def _train_in_pieces(self, loss: torch.Tensor, inputs: Any, targets: Sequence[Any]) -> torch.Tensor:
        """Gradients and update by PyTorch, after the forward pass; the loss without its gradient."""
        check_loss(loss)
        self._backward_in_pieces(loss)
        self._warn_of_nothing(any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]))
        self._update_in_pieces(rows_of(pytree.tree_leaves((inputs, targets))))
        if not self.keep_gradients:
            self._drop_gradients()
        return loss.detach() if self.ranks is None else self.ranks.mean(loss)

    def _backward_in_pieces(self, loss: torch.Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()

    def _update_in_pieces(self, rows: int) -> None:
        """Reduce the gradients of a batch of `rows` rows, unscale, clip, update and adapt the scale in PyTorch."""
        if self.ranks is not None:
            parameters = self._parameters()
            reduce_in_pieces(self.ranks, parameters, self.optimizer, self.clipping, rows, self._overwritten)
        clipped = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.scaler is None:
            self.gradient_norm = self.clipping.apply(clipped)
            self.optimizer.step()
            return
        self.scaler.unscale_(self.optimizer)
        self.gradient_norm = self.clipping.apply(clipped)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _compiles_updates(self) -> bool:
        """Whether PyTorch's optimizer updates by a program where nothing else is compiled."""
        return True

    def _loss_in_pieces(self, key: Any, inputs: Any, targets: Sequence[Any], compiled: bool = True) -> torch.Tensor:
        """The loss, of the compiled model under PyTorch's autograd."""
        if self.pieces is None and compiled:
            self.pieces = self.model if _as_it_is(self.model) else optimized(self.model, self.options)
            if (state := state_of(self.pieces)) is not None:
                state.faster.compiled = True  # the whole step is timed
        if not compiled and self.ranks is None and self._compiles_updates():
            update_for(self.model, self.options)
        model = self.pieces if self.pieces is not None and compiled else self.model
        try:
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            elif isinstance(inputs, tuple | list):
                output = model(*inputs)
            else:
                output = model(inputs)
            if self.loss is not None:
                loss = self.loss(output, *targets)
            else:
                loss = loss_of(output)
            check_loss(loss)
        except Exception as error:
            self._at_fault(key, error, inputs, targets)
            raise
        return loss

    def _at_fault(self, key: Any, error: Exception, inputs: Any, targets: Sequence[Any]) -> None:
        """Forget arguments that raised an error: they were at fault, and not a break of the step."""
        why = self._in_pieces.pop(key, None)
        if why is not None and why not in self._in_pieces.values() and why in self.breaks:
            self.breaks.remove(why)
        worked = f"; a step that worked took {self._worked}" if self._worked else ""
        error.add_note(f"daceml_train: the step was given {describe([inputs, *targets])}{worked}")

    def _warn(self, key: Any) -> None:
        """Warn once that and why steps run in pieces, unless the compiled model has done so."""
        why, state = self._in_pieces.get(key), state_of(self.pieces)
        if why is not None and self.pieces is not None and (state is None or not state.backend.breaks):
            self._warn_once(f"daceml_train runs a training step in pieces: {why}")

    def _warn_of_nothing(self, updates: bool) -> None:
        """Warn once where a step `updates` nothing."""
        if not updates:
            self._warn_once(
                "a daceml_train training step updates nothing: no parameter of its optimizer has a gradient; "
                "make the optimizer of the parameters of the model that is trained, after they are converted"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logs.warn(message)


def _as_it_is(model: torch.nn.Module) -> bool:
    """Whether steps in pieces call a model itself: `optimize` has returned it, or would refuse it."""
    return state_of(model) is not None or isinstance(model, torch.jit.ScriptModule) or "forward" in vars(model)
