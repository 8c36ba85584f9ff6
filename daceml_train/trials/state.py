"""The state of training: all that the next steps depend on, as plain containers of tensors, and back to the bit.

It is the parameters and buffers of model and loss, attributes of modules that are numbers, texts, tensors or containers
of them, the optimizer's state, the scaler, and the generators of PyTorch, Python and NumPy. The options of the
optimizer are not part of it: they are settings.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid

State = dict[str, Any]
"""Dictionaries, lists, tuples, numbers, texts and tensors: what `torch.load(weights_only=True)` accepts."""

_PLAIN = (bool, int, float, str, type(None))


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, each once."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for path, module in self.modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}"] = tensor
        outside = [p for p in self.trained if id(p) not in seen]
        return found | {f"optimizer.{position}": p for position, p in enumerate(outside)}

    # ---- there --------------------------------------------------------------------------------------------------
    def snapshot(self) -> State:
        """A copy of the state."""
        state = self.step.optimizer.state
        return {
            "tensors": {name: tensor.detach().clone() for name, tensor in self.tensors().items()},
            "attributes": {path: _attributes(module) for path, module in self.modules.items()},
            "optimizer": [_copied(dict(state.get(p, {}))) for p in self.trained],
            "scaler": None if self.step.scaler is None else dict(self.step.scaler.state_dict()),
            "also": {name: _copied(part.state_dict()) for name, part in self.also.items()},
            "generators": generators(),
        }

    # ---- and back -----------------------------------------------------------------------------------------------
    def restore(self, state: State) -> None:
        """Make the state what it was, in the tensors that a compiled step is bound to."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(state["tensors"][name])
            for parameter, saved in zip(self.trained, state["optimizer"], strict=True):
                self._restore_optimizer(parameter, saved)
        self.restore_attributes(state)
        if self.step.scaler is not None:
            self.step.scaler.load_state_dict(state["scaler"])
        for name, part in self.also.items():
            part.load_state_dict(_copied(state["also"][name]))
        restore_generators(state["generators"])

    def restore_attributes(self, state: State) -> None:
        """Set the attributes of modules, whether they train among them, to what they were."""
        for path, module in self.modules.items():
            saved = state["attributes"][path]
            for name, value in _attributes(module, copy=False).items():
                if name in saved and not same(value, saved[name]):
                    setattr(module, name, _copied(saved[name]))

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
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and _alike(now, value):
                now.copy_(value)
            else:
                own[name] = value.to(_device(name, value, parameter), copy=True) if _is_tensor(value) else value

    def moved(self, state: State) -> str:
        """The name of a tensor that is not what it was in a snapshot, or nothing."""
        for name, tensor in self.tensors().items():
            if not same(tensor.detach(), state["tensors"][name]):
                return name.removeprefix("model.")
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


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal to the bit: NaN equals itself, and zeros differ by their sign."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if not _alike(first, second):
            return False
        return bool(torch.equal(raw(first), raw(second).to(first.device)))
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float):
        return bool(first.hex() == second.hex())
    return bool(first == second)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in its order of elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest_of(state: Any) -> str:
    """A hash of a state."""
    found = hashlib.sha256()
    for part in _texts(state):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:32]


def size_of(state: Any) -> int:
    """The bytes of a state's tensors."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts: Sequence[Any] = list(state.values()) if isinstance(state, dict) else state
    return sum(map(size_of, parts)) if isinstance(state, dict | list | tuple) else 0


def _texts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield raw(value).cpu().numpy().tobytes()
    elif isinstance(value, dict):
        yield f"dict {len(value)}".encode()
        for name, entry in value.items():
            yield str(name).encode()
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for entry in value:
            yield from _texts(entry)
    else:
        yield (value.hex() if isinstance(value, float) else f"{type(value).__name__}:{value!r}").encode()


def _attributes(module: torch.nn.Module, copy: bool = True) -> dict[str, Any]:
    """The attributes that are numbers, texts, tensors, or containers of them; PyTorch's begin with an underscore."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and _is_plain(value)}
    return _copied(found) if copy else found


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(name) in (str, int) and _is_plain(entry) for name, entry in value.items())
    return type(value) in _PLAIN or type(value) is torch.Tensor


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value)) if type(value) in (list, tuple) else tuple(map(_copied, value))
    if value is None or isinstance(value, _PLAIN):
        return value
    advice = "keep numbers, texts, tensors, or containers of them"
    raise Invalid(f"a state that is saved contains {type(value).__name__}", advice=advice)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype is second.dtype and first.shape == second.shape


def _device(name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.device:
    """Where a tensor of an optimizer's state belongs: beside its parameter, or on the CPU, where a count was saved."""
    return parameter.device if value.ndim or value.device == parameter.device else value.device


__all__ = ["State", "Stateful", "Training", "generators", "restore_generators", "same", "seeded"]
