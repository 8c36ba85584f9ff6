"""The root of a tree: what two trials have in common before their first step, as named hashes.

It is the code of the model, the loss, the optimizer and the user's functions with what they refer to (see
`fingerprints`), the initial state, the options of the step, and the versions of all that decides about bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from daceml_train import processor
from daceml_train.driver.micro_batches import MicroBatchedStep
from daceml_train.driver.step import TrainingStep
from daceml_train.trials.fingerprints import Seen, fingerprint, hooks
from daceml_train.trials.keys import digest
from daceml_train.trials.state import State, Training
from daceml_train.trials.values import PLAIN, digest_of


def root_parts(
    training: Training, state: State, functions: Mapping[str, Any], name: str | None, seen: dict[str, Seen]
) -> dict[str, str]:
    """What a root depends on: each part with its hash, or its text where that is short.

    `seen` receives what each of the functions refers to. What `apply` refers to, it may write: the others do not
    depend on its content.
    """
    step = training.step
    initial = {key: value for key, value in state.items() if key != "generators"}
    own = training.own()
    parts = {
        "model": _modules(training, name),
        "loss": "" if step.loss is None else fingerprint(step.loss, "the loss", name, own=own),
        "optimizer": _optimizer(step.optimizer, training),
        "options": _options(step),
        "initial state": digest_of(initial),
        "generators": digest_of(state["generators"]),
        "name": name or "",
        "versions": versions(step),
    }
    for role in sorted(functions):  # apply is the first one
        written = [value for value in seen.get("apply", {}).values() if isinstance(value, torch.Tensor | np.ndarray)]
        function, found = functions[role], seen.setdefault(role, {})
        parts[role] = "" if function is None else fingerprint(function, role, name, found, [*own, *written])
    return parts


def versions(step: TrainingStep) -> str:
    """What decides about the bits of a step besides its text: versions, threads, the processor, determinism."""
    device = next((p.device for p in step.model.parameters()), torch.device("cpu"))
    kind = device.type
    found = {
        "torch": torch.__version__,
        "daceml_train": importlib.import_module("daceml_train").__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor.described(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else str(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "off",
    }
    return ", ".join(f"{key} {value}" for key, value in found.items())


def _modules(training: Training, name: str | None) -> str:
    """The classes of modules, which parameters are trained, and what functions and objects they hold.

    Numbers, containers and tensors among the attributes are part of the initial state.
    """
    own, texts = training.own(), list[str]()

    def add(value: Any) -> None:
        texts.append(fingerprint(value, "the model", name or "", own=own))

    for path, module in training.modules.items():
        texts += [path, type(module).__qualname__, module.extra_repr()]
        texts += [f"{n} {p.requires_grad}" for n, p in module._parameters.items() if p is not None]
        for hook in hooks(module):
            add(hook)
    for kind in sorted({type(module) for module in training.modules.values()}, key=lambda k: k.__qualname__):
        add(kind)
    for path, attribute, value in training.attributes.each():
        if type(value) not in (*PLAIN, torch.Tensor):
            texts.append(f"{path}.{attribute}")
            add(value)
    for place, tensor in training.tensors().items():
        for hook in hooks(tensor):
            texts.append(place)
            add(hook)
    return digest(*texts)


def _optimizer(optimizer: torch.optim.Optimizer, training: Training) -> str:
    names = {id(p): str(i) for i, p in enumerate(training.trained)}
    own = training.own()

    def of(value: Any) -> str:
        return fingerprint(value, "the optimizer", "", own=own)

    texts = [of(type(optimizer))]
    for group in optimizer.param_groups:
        texts.append(of({key: value for key, value in sorted(group.items()) if key != "params"}))
        texts += [names[id(p)] for p in group["params"]]
    kept = {key: value for key, value in sorted(vars(optimizer).items()) if key not in _OF_OPTIMIZERS}
    texts += [of(kept), *map(of, hooks(optimizer))]
    return digest(*texts)


_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "step", "_step_count"}
"""What PyTorch keeps in an optimizer and in one with a schedule: the state is part of the initial state."""


def _options(step: TrainingStep) -> str:
    own = step.options
    texts = [type(step).__name__, repr(step.clipping), str(own.pipeline), own.randomness, str(own.dynamic)]
    if isinstance(step, MicroBatchedStep):
        texts += [str(step.count), str(step.share)]
    if step.scaler is not None:
        texts += [f"{key}={value}" for key, value in step.scaler.state_dict().items()]
    return digest(*texts)


__all__ = ["root_parts", "versions"]
