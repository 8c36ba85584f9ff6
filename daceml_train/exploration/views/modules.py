"""A model's modules before the capture, as rows of a widget's tree: names, and the bytes of parameters.

The keys are those of the same modules in the forward pass, so that what was opened stays open once the graph is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from daceml_train.exploration.views.view import FIRST, LIMIT
from daceml_train.reporting.numbers import bytes_text

ROOT = "forward"


class Modules:
    """The tree of a model's modules. `open` holds the keys of opened groups, oldest first."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.touched: list[str] = []
        """The groups that a person opened."""
        self.open = [ROOT]
        level, count = list(model.named_children()), len(list(model.children()))
        while level:  # as `view_of` opens a graph
            following: list[tuple[str, nn.Module]] = []
            for path, module in level:
                inside = list(module.named_children())
                if inside and count + len(inside) - 1 <= FIRST:
                    count += len(inside) - 1
                    self.open.append(_key(path))
                    following += [(f"{path}.{name}", child) for name, child in inside]
            level = following

    def opening(self, key: str) -> None:
        """Open a group."""
        if key not in self.open:
            self.open.append(key)
            self.touched.append(key)

    def closing(self, key: str) -> None:
        """Close a group."""
        self.open = [k for k in self.open if k != key]
        self.touched = [k for k in self.touched if k != key]

    def rows(self) -> list[dict[str, Any]]:
        """The rows as far as the tree is open, each with its depth."""
        rows: list[dict[str, Any]] = []
        for path, module, depth in self._walk("", self.model, 0):
            if len(rows) == LIMIT:
                break
            key, opens = _key(path), any(True for _ in module.children())
            label = path.rpartition(".")[2] or ROOT
            rows.append(
                {
                    "key": key,
                    "kind": "module" if path else "phase",
                    "label": label,
                    "module": path,
                    "phase": ROOT,
                    "bytes": parameter_bytes(module),
                    "flops": 0,
                    "opens": opens,
                    "operators": 0,
                    "depth": depth,
                    "open": key in self.open,
                }
            )
        return rows

    def details(self, key: str) -> dict[str, Any] | None:
        """The details of a module; None for a key that is not a module's."""
        path = "" if key == ROOT else key.removeprefix(f"{ROOT}/")
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            return None
        count = sum(p.numel() for p in module.parameters() if not is_lazy(p))
        size = bytes_text(parameter_bytes(module))
        text = f"{type(module).__name__}({module.extra_repr()})\n{count:,} parameters, {size}"
        row = {"key": key, "label": path or type(module).__name__, "kind": "module", "module": path, "phase": ROOT}
        return {**row, "text": text}

    def _walk(self, path: str, module: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module, int]]:
        yield path, module, depth
        if _key(path) in self.open:
            for name, child in module.named_children():
                yield from self._walk(f"{path}.{name}" if path else name, child, depth + 1)


def _key(path: str) -> str:
    return f"{ROOT}/{path}" if path else ROOT


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters; those that get their sizes in a first call have none yet."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p))
