"""Names: the path of an initializer in the module, and the name of a value in the generated Python."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

import torch


def homes(names: Iterable[str]) -> dict[str, str]:
    """The path in the module for each initializer: its own name if `state_dict` allows it.

    `encoder.layer.0.weight` becomes parameter `weight` of `encoder.layer.0`, as in the model that was exported.
    """
    taken: set[str] = set()
    folders: set[str] = set()
    result = {}
    for name in names:
        path = _acceptable(name)
        while path in taken or path in folders or any(prefix in taken for prefix in _prefixes(path)):
            path = path.replace(".", "_") + "_"
        taken.add(path)
        folders.update(_prefixes(path))
        result[name] = path
    return result


def _acceptable(name: str) -> str:
    parts = [part for part in name.split(".") if part] or ["unnamed"]
    return ".".join(part + "_" if hasattr(torch.nn.Module(), part) else part for part in parts)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def access(path: str) -> str:
    """The Python expression for an attribute of `self` at a path."""
    expression = "self"
    for part in path.split("."):
        if part.isidentifier() and not keyword.iskeyword(part):
            expression += f".{part}"
        else:
            expression = f"getattr({expression}, {part!r})"
    return expression


def identifier(name: str, taken: set[str]) -> str:
    """A new Python identifier like `name`, which is added to those taken."""
    text = re.sub(r"\W+", "_", name).strip("_") or "x"
    text = f"x_{text}" if text[0].isdigit() else text
    text = text + "_" if keyword.iskeyword(text) or text == "self" else text
    unique, count = text, 1
    while unique in taken:
        count += 1
        unique = f"{text}_{count}"
    taken.add(unique)
    return unique


def snake_case(operator: str) -> str:
    """`BatchNormalization` as `batch_normalization`: the name of an operator's function in the source."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", operator).lower()
