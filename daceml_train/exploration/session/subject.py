"""Subject: the captured model of a session, and its training graph before any pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from daceml_train.driver.binding import differentiable_outputs
from daceml_train.driver.capture_only import CapturedCall, capture_call
from daceml_train.driver.checking import check_module, check_scaler, loss_of
from daceml_train.driver.goals import WithGradients, with_gradients
from daceml_train.driver.micro_batches import MicroBatchedStep, Reduction, check_parts, split
from daceml_train.driver.module import original
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import DacemlError, Invalid, Unsupported
from daceml_train.frontends.torch.dynamo.tracing import reason
from daceml_train.graph.graph import Graph
from daceml_train.training.gradients import Clipping, GradientOptions, scaling_of
from daceml_train.training.joint import Joint, Trained, joint_graph

Loss = Callable[..., torch.Tensor]
NORM = "gradient norm"


@dataclass(frozen=True)
class GradientSettings:
    """What a step does to gradients before the update, as in `training_step`.

    With `micro_batches` the subject is the program of the last part of a batch, which adds its gradients to those of
    the earlier parts, and updates.
    """

    clipping: Clipping = Clipping()
    scaler: torch.amp.GradScaler | None = None
    micro_batches: int = 1
    reduction: Reduction = "mean"

    @property
    def share(self) -> float:
        """The factor of the gradient of a part."""
        return 1 / self.micro_batches if self.reduction == "mean" else 1.0

    @property
    def options(self) -> GradientOptions:
        """The same for the joint graph."""
        return GradientOptions(self.clipping, scaling_of(self.scaler))


@dataclass(frozen=True)
class Subject:
    """A model and its arguments. `training_graph` differentiates the captured graph, or the result of passes of level
    `forward`: with an optimizer it is the whole step, with a loss alone the loss and all gradients, with neither the
    module's outputs and the gradients by cotangents that are inputs.
    """

    model: torch.nn.Module
    inputs: tuple[Any, ...]
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    seen: CapturedCall
    trained: tuple[Trained, ...]
    wrt: tuple[str, ...]
    """Captured inputs whose gradients are outputs."""
    treatment: GradientSettings = GradientSettings()
    training: Mapping[str, bool] = field(default_factory=dict)
    """Module -> whether it was in training mode when it was captured: the user's model may be in another one later."""

    @staticmethod
    def of(
        model: torch.nn.Module,
        inputs: Sequence[Any],
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        options: Settings,
        treatment: GradientSettings = GradientSettings(),
    ) -> Subject:
        """Capture a model. Nothing is run or changed. Raises `Unsupported` if it is not one graph."""
        check_module("a session", model)
        check_scaler(treatment.scaler)
        check_parts(treatment.micro_batches, treatment.reduction)
        model = original(model)
        if optimizer is None and treatment != GradientSettings():
            raise Invalid("clipping, a scaler and micro-batches belong to a step with an optimizer")
        if treatment.reduction == "batch":
            raise Invalid("a session looks at parts of a batch with reduction='mean' or 'sum', given 'batch'")
        training = {path: module.training for path, module in held_modules(model, loss).items()}
        try:
            if loss is None and optimizer is None:
                seen = capture_call(model, inputs, options.randomness)
                wrt = tuple(name for name, tensor in seen.tensors.items() if tensor.requires_grad)
                return Subject(model, tuple(inputs), None, None, seen, (), wrt, training=training)
            trained_by = optimizer if optimizer is not None else _any_optimizer(model)
            if not inputs:
                raise Invalid("a training step takes inputs and targets, given none")
            clipping, scaler = treatment.clipping, treatment.scaler
            step = TrainingStep(model, loss, trained_by, options, optimizer is None, clipping, scaler)
            if treatment.micro_batches != 1:
                count, reduction = treatment.micro_batches, treatment.reduction
                step = MicroBatchedStep(model, loss, trained_by, options, count, reduction, clipping, scaler)
                first, targets = split(inputs[0], tuple(inputs[1:]), count)[-1]
                inputs = (first, *targets)
            seen, trained, kept = step.look(inputs[0], *inputs[1:])
        except DacemlError:
            raise
        except Exception as error:
            if any(frame.name == loss_of.__name__ for frame in getattr(error, "real_stack", None) or ()):
                message = "loss=None uses the result's `loss`, and the model's result has none"
                raise Invalid(message, advice="pass loss=") from error
            raise Unsupported(f"the model cannot be captured: {reason(error)}") from error
        updated = tuple(trained) if optimizer else ()
        if optimizer is not None and not updated:
            message = "the optimizer updates no parameter that the loss depends on"
            raise Invalid(message, advice=f"make it of the parameters of this {type(model).__name__}")
        return Subject(model, tuple(inputs), loss, optimizer, seen, updated, tuple(kept), treatment, training)

    @property
    def kind(self) -> str:
        """`step`, `loss` or `module`."""
        if self.optimizer is not None:
            return "step"
        return "module" if self.loss is None else "loss"

    @property
    def name(self) -> str:
        """The model, the loss and the optimizer."""
        parts = [type(self.model).__name__]
        parts += [type(self.optimizer).__name__] if self.optimizer is not None else []
        return ", ".join(parts)

    @property
    def captured(self) -> Graph:
        """The captured forward pass, with the loss if there is one."""
        return self.seen.captured.graph

    def training_graph(self, forward: Graph) -> Graph:
        """The graph that passes after differentiation see."""
        if self.kind != "module":
            return joint_graph(forward, self.trained, self.wrt, self.treatment.options).graph
        return self._with_gradients(forward).graph

    @cached_property
    def joint(self) -> Joint:
        """The inputs and outputs of the captured graph's step; for sessions with a loss or an optimizer."""
        return joint_graph(self.captured, self.trained, self.wrt, self.treatment.options)

    @cached_property
    def cotangents(self) -> tuple[int, ...]:
        """The captured outputs whose cotangents are inputs, in their order; for sessions with neither."""
        return self._with_gradients(self.captured).cotangents

    @cached_property
    def gradients(self) -> tuple[str, ...]:
        """Captured inputs whose gradients are outputs, in their order."""
        return self.joint.gradients if self.kind != "module" else self._with_gradients(self.captured).gradients

    @property
    def results(self) -> int:
        """How many of the first outputs are results of the forward pass."""
        return len(self.captured.outputs) if self.kind == "module" else 1

    def path(self, name: str) -> str:
        """The user's name of a captured input; an empty name means the loss scaler."""
        return self.captured.inputs[name].path or name if name else "the scaler"

    @property
    def labels(self) -> tuple[str, ...]:
        """The user's description of each output of the training graph."""
        forward = ("loss",) if self.kind != "module" else tuple(f"output {i}" for i in range(self.results))
        states = self.joint.made if self.kind != "module" else []
        gradients = tuple(f"gradient of {self.path(name)}" for name in self.gradients)
        norm = (NORM,) if self.kind != "module" and self.joint.norm else ()
        return (*forward, *gradients, *(f"{state} of {self.path(name)}" for name, state in states), *norm)

    def with_gradients(self) -> Subject:
        """The same step with the gradients of all trained parameters as outputs."""
        return replace(self, wrt=tuple(t.parameter for t in self.trained)) if self.kind == "step" else self

    def _with_gradients(self, forward: Graph) -> WithGradients:
        return with_gradients(forward, self.wrt, differentiable_outputs(self.seen.captured))


def held_modules(model: torch.nn.Module, loss: Loss | None) -> dict[str, torch.nn.Module]:
    """The modules of a model and of a loss by their paths; those of the loss are below `loss`."""
    found = dict(model.named_modules())
    return found | (dict(loss.named_modules(prefix="loss")) if isinstance(loss, torch.nn.Module) else {})


def _any_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer for capturing a step without one: it is left out of the graph."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise Invalid(f"no parameter of {type(model).__name__} requires a gradient: there is nothing to train")
    return torch.optim.SGD(parameters, lr=0.0)
