"""What of a program is compared with eager execution: losses, updates, Python effects, random streams."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.programs.way import Streams, Way

ROUNDING = 1e-4
"""Of losses and of kept numbers, relative: float32 over some twenty steps that add in another order."""
UPDATE = 1e-2
"""Of a parameter's change over all steps, by the norm: AdamW divides by a gradient's size, so that the rounding of a
gradient near zero becomes a whole step of that element. A single update that is missing is 4 %."""
NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?|-?\d+")


def differs(ours: Any, theirs: Any, path: str = "") -> str:
    """Where two Python values differ; nothing if they do not."""
    if type(ours) is not type(theirs):
        return f"{path}: {type(ours).__name__} instead of {type(theirs).__name__}"
    if isinstance(theirs, Tensor):
        return _tensors_differ(ours, theirs, path)
    if isinstance(theirs, np.ndarray):
        return _tensors_differ(torch.from_numpy(ours), torch.from_numpy(theirs), path)
    if isinstance(theirs, float):
        same = ours == theirs or math.isclose(ours, theirs, rel_tol=ROUNDING, abs_tol=ROUNDING)
        return "" if same else f"{path}: {ours} instead of {theirs}"
    if isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            return f"{path}: keys {list(ours)} instead of {list(theirs)}"
        return next(filter(None, (differs(ours[key], theirs[key], f"{path}.{key}") for key in theirs)), "")
    if isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} elements instead of {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next(filter(None, (differs(a, b, f"{path}[{number}]") for number, (a, b) in pairs)), "")
    if hasattr(theirs, "__dict__") and not isinstance(theirs, type):
        return differs(vars(ours), vars(theirs), path)
    return "" if ours == theirs else f"{path}: {ours!r} instead of {theirs!r}"


def _tensors_differ(ours: Tensor, theirs: Tensor, path: str) -> str:
    if (ours.dtype, ours.shape, ours.requires_grad) != (theirs.dtype, theirs.shape, theirs.requires_grad):
        return f"{path}: {ours.dtype}{list(ours.shape)}, gradient {ours.requires_grad}, differs in its kind"
    size = float(theirs.detach().abs().max()) if theirs.numel() and theirs.is_floating_point() else 0.0
    if torch.allclose(ours.detach(), theirs.detach(), rtol=0, atol=ROUNDING * max(size, 1e-2)):
        return ""
    return f"{path}: a tensor differs"


def kept(model: nn.Module) -> dict[str, Any]:
    """What the modules keep in attributes of Python, and their buffers."""
    found: dict[str, Any] = dict(model.named_buffers())
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found |= {f"{name}.{key}": value for key, value in own.items() if not _has_modules(value)}
    return found


def _has_modules(value: Any) -> bool:
    return isinstance(value, nn.Module) or (isinstance(value, list) and any(isinstance(v, nn.Module) for v in value))


def printed_differs(ours: str, theirs: str) -> str:
    """How printed text differs: numbers by value and by digits, all else by letters."""
    for number, (a, b) in enumerate(zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue="<nothing>"), 1):
        found, expected = ([m.group() for m in NUMBER.finditer(line)] for line in (a, b))
        shaped = NUMBER.sub("#", a) == NUMBER.sub("#", b) and [len(n) for n in found] == [len(n) for n in expected]
        near = shaped and all(
            abs(float(x) - float(y)) <= ROUNDING * max(abs(float(y)), 1) + _digit(y)
            for x, y in zip(found, expected, strict=True)
        )
        if not near:
            return f"printed line {number}: {a!r} instead of {b!r}"
    return ""


def _digit(number: str) -> float:
    """One unit of the last digit printed; none of an integer."""
    return 10.0 ** -len(number.partition(".")[2]) if "." in number and "e" not in number else 0.0


def streams_differ(ours: Streams, theirs: Streams) -> str:
    """The random streams that are elsewhere."""
    same = torch.equal(ours[0], theirs[0]), ours[1] == theirs[1], _numpy(ours[2]) == _numpy(theirs[2])
    where = [name for name, equal in zip(("PyTorch", "Python", "NumPy"), same, strict=True) if not equal]
    return f"random stream of {', '.join(where)}" if where else ""


def _numpy(state: Any) -> Any:
    return state[0], state[1].tobytes(), *state[2:]


def step_differs(ours: Way, theirs: Way) -> dict[str, str]:
    """What differs after the last step of both: kinds and places."""
    loss, expected = ours.losses[-1], theirs.losses[-1]
    near = math.isclose(loss, expected, rel_tol=ROUNDING, abs_tol=1e-6)
    effects = differs(kept(ours.program), kept(theirs.program)) or printed_differs(
        ours.printed.getvalue(), theirs.printed.getvalue()
    )
    found = {
        "losses": "" if near else f"loss {loss} instead of {expected}",
        "effects": effects,
        "random": streams_differ(ours.streams, theirs.streams),
    }
    return {kind: message for kind, message in found.items() if message}


def updates_differ(ours: Way, theirs: Way) -> str:
    """The first parameter whose change over all steps differs."""
    expected = dict(theirs.program.named_parameters())
    for name, parameter in ours.program.named_parameters():
        moved = float((expected[name] - theirs.initial[name]).detach().norm())
        error = float((parameter - expected[name]).detach().norm())
        if not error <= UPDATE * moved:
            return f"{name} is off by {error / moved if moved else math.inf:.1e} of its change"
    return ""
