"""What a random layer is made of, and how its numbers are drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Layer:
    """Lines for `__init__`, then a statement on `h`; `{n}` is the layer's number, `a0`, `a1`, ... earlier values."""

    forward: str
    init: tuple[str, ...] = ()


@dataclass
class Draw:
    """What a proposal draws from: the shape of `h`, a random generator, shapes and modules that are there."""

    random: Random
    shape: tuple[int, ...]
    number: int
    saved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)

    def pick(self, *options: str) -> str:
        """One of the texts."""
        return self.random.choice(options)

    def dim(self) -> int:
        """A dimension, counted from either end."""
        return self.random.randrange(-len(self.shape), len(self.shape))

    def other(self, wanted: Callable[[tuple[int, ...]], bool] = lambda shape: True) -> str | None:
        """An earlier value whose shape is as `wanted`."""
        names = [name for name, shape in self.saved.items() if wanted(shape)]
        return self.random.choice(names) if names else None


def _text(*families: tuple[str, ...]) -> Callable[[Draw], Layer | None]:
    def propose(draw: Draw) -> Layer | None:
        text = draw.pick(*draw.random.choice(families))
        text = text.replace("{d}", str(draw.dim())).replace("{e}", str(draw.dim()))
        return Layer(text if re.search(r"\bh = ", text) else f"h = {text}")

    return propose
