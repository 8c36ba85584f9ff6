"""Checks of a training step's model, loss, optimizer and arguments, whose messages say what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from daceml_train.errors import Invalid, Unsupported
from daceml_train.lowering.device import Device
from daceml_train.runtime.placement import common_device


def check_tensors(flat: Sequence[Any]) -> None:
    """Raise `Invalid` for a tensor that no step takes."""
    for position, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "cuda"):
            raise Invalid(f"argument {position} is on device {leaf.device}, expected cpu or cuda")


def unstrided(flat: Sequence[Any]) -> Unsupported | None:
    """Why a call with a sparse argument, if there is one, is not one program."""
    for position, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            return Unsupported(f"argument {position} has layout {leaf.layout}")
    return None


def watched() -> str:
    """What looks into PyTorch's backward pass, which then has to compute the gradients; nothing if nothing does."""
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else "saved_tensors_hooks are set"


def given_as(value: Any) -> str:
    """What kind of value an argument is, for messages."""
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__


def check_module(what: str, model: Any) -> None:
    """Raise `Invalid` unless `what` is given a module."""
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise Invalid(f"{what} takes a module, given {given_as(model)}", advice=f"make one: {model.__name__}(...)")
    if not isinstance(model, torch.nn.Module):
        advice = "give it step.model" if isinstance(getattr(model, "model", None), torch.nn.Module) else ""
        raise Invalid(f"{what} takes a torch.nn.Module, given {given_as(model)}", advice=advice)
    if isinstance(model, torch.jit.ScriptModule):
        advice = "give it the module that it was made of"
        raise Invalid(f"{what} takes a module that runs in Python, given one of torch.jit", advice=advice)


def check_flag(name: str, value: Any) -> None:
    """Raise `Invalid` for anything but True and False."""
    if value is not True and value is not False:
        raise Invalid(f"{name} is True or False, given {value!r}")


def check_scaler(scaler: Any) -> None:
    """Raise `Invalid` for anything but a scaler or None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise Invalid(f"scaler is a torch.amp.GradScaler, given {given_as(scaler)}")


def check(model: Any, loss: Any, optimizer: Any) -> None:
    """Raise `Invalid` for arguments of another type."""
    if not isinstance(model, torch.nn.Module):
        raise Invalid(f"model must be a torch.nn.Module, given {given_as(model)}")
    if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
        raise Invalid(f"loss must be callable or None, given {given_as(loss)}", advice=f"pass {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise Invalid(f"loss must be callable or None, given {given_as(loss)}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Invalid(f"optimizer must be a torch.optim.Optimizer, given {given_as(optimizer)}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Invalid(
            "LBFGS computes loss and gradients several times per step, which a training step does once",
            advice="compile the model, daceml_train.optimize(model), and call optimizer.step(closure)",
        )


def forwards_of(modules: Iterable[torch.nn.Module]) -> dict[type, Any]:
    """The `forward` of each class of these modules; TorchDynamo does not notice that a class gets another one."""
    return {type(module): getattr(type(module), "forward", None) for module in modules}


def same_forwards(known: Mapping[type, Any]) -> bool:
    """Whether classes still have these functions."""
    return all(getattr(kind, "forward", None) is forward for kind, forward in known.items())


def loss_of(output: Any) -> Any:
    """The loss in a model's result. Raises `Invalid` for a tensor, which has none."""
    if isinstance(output, torch.Tensor):
        advice = "pass loss=lambda output: output if it is the loss itself" if not output.ndim else "pass a loss"
        shape = list(output.shape)
        raise Invalid(f"loss=None uses the result's `loss`, and the result is a tensor {shape}", advice=advice)
    return output["loss"] if isinstance(output, Mapping) else output.loss


def check_loss(loss: Any) -> None:
    """Raise `Invalid` for what has no gradient that a step can take."""
    if not isinstance(loss, torch.Tensor):
        advice = "return it as a tensor, without item() or float(), by itself; a step calls backward() on it"
        raise Invalid(f"the loss is a tensor with one element, given {given_as(loss)}", advice=advice)
    if loss.numel() != 1:
        advice = "reduce it: reduction='mean', loss.mean(), loss.sum()"
        raise Invalid(f"the loss is a tensor with one element, given shape {list(loss.shape)}", advice=advice)
    if not loss.requires_grad:
        inference = torch.is_inference_mode_enabled()
        advice = "no parameter that it depends on requires a gradient; look for frozen parameters, detach(), no_grad()"
        raise Invalid("the loss has no gradient", advice="leave torch.inference_mode()" if inference else advice)


def device_of(model: torch.nn.Module, by_name: Mapping[str, torch.Tensor], flat: Sequence[Any]) -> Device:
    """The device of all inputs. Raises `Invalid` that names two inputs on different ones."""
    position = {id(leaf): f"argument {i}" for i, leaf in enumerate(flat)}
    paths = {id(p): n for n, p in (*model.named_parameters(), *model.named_buffers())}
    names = {id(t): position.get(id(t)) or paths.get(id(t)) or name for name, t in by_name.items()}
    return common_device({names[id(t)]: t for t in by_name.values()})


def refuse_mixed_devices(model: torch.nn.Module, flat: Sequence[Any]) -> None:
    """Raise `DeviceMismatch` if devices are why the step cannot be captured."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    common_device(named | {f"argument {i}": t for i, t in enumerate(flat) if isinstance(t, torch.Tensor)})


def kind_of(leaf: Any) -> Any:
    """The properties of an argument that select a bound step; Dynamo's guards compare the rest."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)
    return leaf.shape, leaf.dtype, leaf.stride() if leaf.layout is torch.strided else leaf.layout, leaf.device
