"""The state of training: all that the next steps depend on, as plain containers of tensors, and back to the bit.

It is the parameters and buffers of model and loss, the attributes of their modules, the optimizer's state, the scaler,
and the generators of PyTorch, Python and NumPy. The options of the optimizer are not part of it: they are settings.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from daceml_train.driver.step import TrainingStep
from daceml_train.trials.attributes import Attributes
from daceml_train.trials.values import alike, copied, same

State = dict[str, Any]
"""Dictionaries, lists, tuples, numbers, texts and tensors: what `torch.load(weights_only=True)` accepts."""


class Stateful(Protocol):
    """An object with a state of its own, such as averaged weights."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state over."""


class Training:
    """The objects whose state a trial moves; `also` are further ones by name."""

    def __init__(self, step: TrainingStep, also: Mapping[str, Stateful] | None = None) -> None:
        self.step, self.also = step, dict(also or {})
        roots = {"model": step.model, "loss": step.loss}
        self.modules = {
            f"{root}.{name}" if name else root: module
            for root, top in roots.items()
            if isinstance(top, torch.nn.Module)
            for name, module in top.named_modules()
        }
        self.trained = [p for group in step.optimizer.param_groups for p in group["params"]]
        self._spare: dict[int, dict[str, Any]] = {}
        """The optimizer's state of parameters that have none at the moment."""
        self.attributes = Attributes(self.modules)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, each once."""
        return self._named()[0]

    def own(self) -> list[Any]:
        """What a state is the content of: functions that refer to it do not depend on what it is at the moment."""
        parts = [self.step, self.step.optimizer, self.step.scaler, *self.also.values(), *self.tensors().values()]
        parts += self.modules.values()
        parts += [
            module for part in self.also.values() if isinstance(part, torch.nn.Module) for module in part.modules()
        ]
        return [part for part in parts if part is not None]

    def _named(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Parameters and buffers by name, each once; and further names of them, each with the first one."""
        found: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        further: dict[str, str] = {}
        for path, module in self.modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                if id(tensor) in first:
                    further[f"{path}.{name}"] = first[id(tensor)]
                else:
                    first[id(tensor)] = f"{path}.{name}"
                    found[f"{path}.{name}"] = tensor
        outside = [p for p in self.trained if id(p) not in first]
        return found | {f"optimizer.{position}": p for position, p in enumerate(outside)}, further

    # ---- there --------------------------------------------------------------------------------------------------
    def snapshot(self) -> State:
        """A copy of the state."""
        state, (tensors, further) = self.step.optimizer.state, self._named()
        return {
            "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
            "further names": further,
            "attributes": self.attributes.snapshot(tensors),
            "optimizer": [copied(dict(state.get(p, {}))) for p in self.trained],
            "scaler": None if self.step.scaler is None else dict(self.step.scaler.state_dict()),
            "also": {name: copied(part.state_dict()) for name, part in self.also.items()},
            "generators": generators(),
        }

    # ---- and back -----------------------------------------------------------------------------------------------
    def restore(self, state: State) -> None:
        """Make the state what it was, in the tensors that a compiled step is bound to."""
        with torch.no_grad():
            self._restore_tensors(state["tensors"], state["further names"])
            for parameter, saved in zip(self.trained, state["optimizer"], strict=True):
                self._restore_optimizer(parameter, saved)
        self.restore_attributes(state)
        if self.step.scaler is not None:
            self.step.scaler.load_state_dict(state["scaler"])
        for name, part in self.also.items():
            part.load_state_dict(copied(state["also"][name]))
        restore_generators(state["generators"])

    def restore_attributes(self, state: State) -> None:
        """Set the attributes of modules, whether they train among them, to what they were."""
        self.attributes.restore(state["attributes"], self.tensors())

    def _restore_tensors(self, saved: Mapping[str, torch.Tensor], further: Mapping[str, str]) -> None:
        """Parameters and buffers; a buffer of another shape, and one that was not there, are set in their modules."""
        for name, tensor in self.tensors().items():
            if name in saved and alike(tensor, saved[name]):
                tensor.copy_(saved[name])
        for path, module in self.modules.items():
            own = f"{path}."
            for name in [n for n in module._buffers if own + n not in saved and own + n not in further]:
                module._buffers[name] = None
            for name, now in [*module._parameters.items(), *module._buffers.items()]:
                value = saved.get(own + name)
                if value is None or (now is not None and alike(now, value)):
                    continue
                if name in module._buffers:
                    device = value.device if now is None else now.device
                    module._buffers[name] = value.to(device, copy=True)
                elif now is not None:
                    now.data = value.to(now.device, copy=True)
        tensors = self.tensors()
        for name, first in further.items():
            path, _, last = name.rpartition(".")
            if last in self.modules[path]._buffers:
                self.modules[path]._buffers[last] = tensors[first]

    def _restore_optimizer(self, parameter: torch.Tensor, saved: Mapping[str, Any]) -> None:
        state = self.step.optimizer.state
        if not saved:
            if parameter in state:
                self._spare[id(parameter)] = state.pop(parameter)
            return
        if parameter not in state:
            state[parameter] = self._spare.pop(id(parameter), {})
        own = state[parameter]
        for name in [name for name in own if name not in saved]:
            del own[name]
        for name, value in saved.items():
            now = own.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and alike(now, value):
                now.copy_(value)
            else:
                device = _device(name, value, parameter) if isinstance(value, torch.Tensor) else None
                own[name] = copied(value) if device is None else value.to(device, copy=True)

    def moved(self, state: State) -> str:
        """The name of a tensor that is not what it was in a snapshot, or nothing."""
        now, before = self.tensors(), state["tensors"]
        for name in [*now, *before]:
            if name not in now or name not in before or not same(now[name].detach(), before[name]):
                return str(name).removeprefix("model.")
        optimizer = self.step.optimizer.state
        for position, (parameter, saved) in enumerate(zip(self.trained, state["optimizer"], strict=True)):
            if not same(dict(optimizer.get(parameter, {})), dict(saved)):
                return f"the optimizer's state of parameter {position}"
        return ""


def generators() -> dict[str, Any]:
    """The states of the generators of PyTorch, on all devices that are in use, of Python, and of NumPy."""
    name, words, *rest = np.random.get_state(legacy=True)
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    numpy = (str(name), torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest)
    version, own, *following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": on_gpu,
        "python": (version, _words(own), *following),
        "numpy": numpy,
    }


@functools.lru_cache(maxsize=4)
def _words(words: tuple[int, ...]) -> torch.Tensor:
    """The words of Python's generator, which seldom moves, as a tensor: copies and files take tensors faster."""
    return torch.tensor(words, dtype=torch.int64)


def restore_generators(saved: Mapping[str, Any]) -> None:
    """Set all generators."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"]:
        torch.cuda.set_rng_state_all(saved["cuda"])
    version, own, *following = saved["python"]
    random.setstate((version, tuple(own.tolist()), *following))
    name, words, *rest = saved["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))


def seeded(seed: int) -> dict[str, Any]:
    """The states of all generators after seeding; the generators themselves stay as they are."""
    now = generators()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return generators()
    finally:
        restore_generators(now)


def _device(name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.device:
    """Where a tensor of an optimizer's state belongs: beside its parameter, or on the CPU, where a count was saved."""
    return parameter.device if value.ndim or value.device == parameter.device else value.device


__all__ = ["State", "Stateful", "Training", "generators", "restore_generators", "seeded"]
