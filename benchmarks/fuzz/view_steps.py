"""Random training steps on views: what a model keeps from step to step shares memory with its loss and its state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.checking import Rejected
from benchmarks.fuzz.view_programs import VIEWS, ViewProgram, random_lines

_SHAPES = ((3, 4), (4, 3), (2, 3, 4), (4, 4), (6,), (2, 6))
_PARTS = (".flatten()[0]", ".flatten()[-1]", ".reshape(-1)[1]", "[0].sum()", ".sum()", ".mean()", "")
_LOSSES = ("h.sum()", "h.flatten()[0]", "h[-1].sum()", "(h * h).mean()", "h.detach().sum() * h.sum()")


@dataclass(frozen=True)
class ViewStep(ViewProgram):
    """A model that reads `self.kept` as `k` and keeps values for the next step; `self.w` is trained."""

    kept: tuple[str, ...] = ()
    """What `self.seen` is set to at the end of a forward pass."""
    carried: bool = False
    """Whether the first of them is `self.kept` in the next step."""
    loss: str = "h"
    """Of `h`, which the forward pass returns."""

    def source(self) -> str:
        """The module's code."""
        lines = ["w, b, k = self.w, self.b, self.kept", *self.lines]
        lines += [f"self.seen = ({', '.join(self.kept)},)"] if self.kept else []
        lines += ["self.kept = self.seen[0]"] if self.kept and self.carried else []
        return "\n    ".join(("def forward(self, x, y):", *lines, f"return {self.results[0]}")) + "\n"

    def module(self) -> nn.Module:
        """The module; `self.kept` is not a buffer."""
        result: Any = super().module()
        result.kept, result.seen = torch.full(self.shape, 0.5), ()
        return result  # type: ignore[no-any-return]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """`x` and `y`, neither of which carries a gradient."""
        x, y = super().inputs()
        return x.detach(), y

    def smaller(self) -> Iterator[ViewProgram]:
        """Also without what is kept."""
        yield from (replace(self, kept=(*self.kept[:i], *self.kept[i + 1 :])) for i in range(len(self.kept)))
        if self.carried:
            yield replace(self, carried=False)
        yield from super().smaller()


def random_step(seed: int, statements: int = 8) -> ViewStep:
    """The training step of a seed. Raises `Rejected` where PyTorch refuses all that was tried."""
    r = random.Random(seed)
    layouts = r.choice(("plain", "plain", "permuted", "sliced")), r.choice(("plain", "permuted", "sliced"))
    program = ViewStep(seed, r.choice(_SHAPES), layouts, (), ("w",))
    module: Any = program.module()
    x, y = program.inputs()
    known: dict[str, Tensor] = {"x": x, "y": y, "b": module.b, "k": module.kept, "w": module.w}
    lines = random_lines(r, known, r.randint(2, statements))
    trained = [n for n, t in known.items() if t.requires_grad]
    h = trained[-1] if r.random() < 0.6 else r.choice(trained)
    result = h + (r.choice(_PARTS) if r.random() < 0.7 else r.choice(VIEWS)(r, known[h]))
    kept = _kept(r, known, h)
    return replace(
        program,
        lines=lines,
        results=(result,),
        kept=kept,
        carried=bool(kept) and _shape(kept[0], known) == program.shape,
        loss="h" if _shape(result, known) == () else r.choice(_LOSSES),
    )


def _kept(r: random.Random, known: dict[str, Tensor], h: str) -> tuple[str, ...]:
    """Most share memory with `h`, and most carry no gradient, with which a step is not one program."""
    near = [n for n, t in known.items() if t.untyped_storage()._cdata == known[h].untyped_storage()._cdata]
    chosen = []
    for _ in range(r.choice((0, 1, 1, 1, 2, 3))):
        name = h if r.random() < 0.4 else r.choice(near if r.random() < 0.5 else [*known])
        view = r.choice(VIEWS)(r, known[name]) if r.random() < 0.4 else ""
        detach = ".detach()" if r.random() < 0.9 else ""
        chosen.append(f"{name}{view}{detach}" if r.random() < 0.5 else f"{name}{detach}{view}")
    return tuple(chosen)


def _shape(expression: str, known: dict[str, Tensor]) -> tuple[int, ...]:
    """The shape of a value. Raises `Rejected` where there is none."""
    try:
        return tuple(eval(expression, {"torch": torch, **known}).shape)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise Rejected(str(error)) from error
