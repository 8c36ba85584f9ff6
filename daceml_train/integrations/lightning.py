"""Lightning: a strategy that runs a module's whole training step as one program.

`Trainer(strategy=CompiledStrategy())` keeps Lightning's loops, counters, logging, and checkpoints. The module's
`training_step`, its gradients, clipping, and the optimizer's update are one program of `daceml_train.training_step`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from daceml_train.driver import optimize, training_step
from daceml_train.driver.options import OptionKeywords
from daceml_train.driver.step import TrainingStep

HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks between the parts of a step. Where one is overridden, the step is several programs."""


class CompiledStrategy(SingleDeviceStrategy):
    """Trains on one device, each step as one program. Keyword arguments are options of `daceml_train.optimize`.

    `apart` says why a module's step is not one program, and is empty where it is: `training_step` is compiled then,
    and Lightning calls backward pass and optimizer. `validation_step`, `test_step`, and `predict_step` are compiled,
    too. `breaks` lists what runs as PyTorch runs it.
    """

    def __init__(self, device: str | torch.device = "cpu", **options: Unpack[OptionKeywords]) -> None:
        super().__init__(device=device)
        self.options = options
        self.apart = ""
        self.step: TrainingStep | None = None
        """The whole step, from the first batch on."""
        self._twin: Any = None

    @property
    def breaks(self) -> list[str]:
        """Why something runs as PyTorch runs it."""
        found = list(self._twin._daceml_train.backend.breaks) if self._twin is not None else []
        return found + (self.step.breaks if self.step is not None else [])

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        self._twin = optimize(module, **self.options)
        self.step = None
        if trainer.state.fn == TrainerFn.FITTING:
            self.apart = _apart(trainer, module, self.optimizers, self.precision_plugin)
            if self.apart:
                message = (
                    f"daceml_train compiles training_step, and Lightning calls backward and optimizer: {self.apart}"
                )
                warnings.warn(message, stacklevel=2)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if self.apart:
                return self._twin.training_step(*args, **kwargs)
            if self.step is None:
                self.step = self._whole()
            return self._whole_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._twin.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._twin.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._twin.predict_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.apart:
            loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        return closure_loss  # the gradients were part of the step

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.apart:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        return closure()  # it calls `training_step`, in which the update takes place

    def _whole(self) -> TrainingStep:
        module = self.lightning_module
        trainer = module.trainer
        by_value = trainer.gradient_clip_algorithm is not None and trainer.gradient_clip_algorithm.value == "value"
        limit = trainer.gradient_clip_val or None
        clip = {"clip_value" if by_value else "clip_norm": None if limit is None else float(limit)}
        return training_step(_Recorded(module), None, self.optimizers[0], **clip, **self.options)  # type: ignore[arg-type]

    def _whole_step(self, batch: Any, *position: Any, **named: Any) -> Any:
        """Train on a batch; the results and logs of `training_step` are unchanged, but the loss has no graph."""
        assert self.step is not None
        recorded: Any = self.step.model
        recorded.position, recorded.named = position, named
        recorded.kept.clear()
        with recorded.recording():
            loss = self.step((batch,))
        logged = {name: value for name, value in recorded.kept.items() if isinstance(name, str)}
        for name, (value, options) in logged.items():
            self.lightning_module.log(name, value.detach() if isinstance(value, torch.Tensor) else value, **options)
        others = {name[0]: value for name, value in recorded.kept.items() if isinstance(name, tuple)}
        return {"loss": loss, **others} if others else loss


class _Recorded(torch.nn.Module):
    """A Lightning module whose result is its loss; what it logs is kept, for Lightning is no part of a program."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.position: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}
        self.kept: dict[Any, Any] = {}
        """Values with options by the name under which they are logged, and further results by `(name,)`."""

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """The loss, as `training_step` with `loss=None` takes it."""
        result = self.module.training_step(batch, *self.position, **self.named)
        if isinstance(result, Mapping):
            for name, value in result.items():
                if name != "loss":
                    self.kept[(name,)] = value
            result = result["loss"]
        return {"loss": result}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Replace `log` and `log_dict` of the module."""
        place = self.module.__dict__
        place["log"], place["log_dict"] = self._log, self._log_dict
        try:
            yield
        finally:
            del place["log"], place["log_dict"]

    def _log(self, name: str, value: Any, **options: Any) -> None:
        self.kept[name] = (value, options)

    def _log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        for name, value in dictionary.items():
            self.kept[name] = (value, options)


def _apart(trainer: Trainer, module: LightningModule, optimizers: list[Any], precision: Precision) -> str:
    """Why a step is not one program; empty where it is one."""
    if not module.automatic_optimization:
        return "the module optimizes by hand (automatic_optimization = False)"
    if len(optimizers) != 1:
        return f"there are {len(optimizers)} optimizers"
    if trainer.accumulate_grad_batches != 1:
        return f"gradients of {trainer.accumulate_grad_batches} batches are accumulated"
    if type(precision) is not Precision:
        return f"{type(precision).__name__} works between the parts of a step"
    for owner in (module, *trainer.callbacks):
        base = LightningModule if owner is module else Callback
        for hook in HOOKS:
            if getattr(type(owner), hook, None) is not getattr(base, hook, None):
                return f"{type(owner).__name__} overrides {hook}"
    return ""


__all__ = ["CompiledStrategy"]
