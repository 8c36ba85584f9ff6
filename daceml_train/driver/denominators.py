"""Denominators: the divisors of the losses of a batch's parts, computed on the whole batch before the parts run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.driver.function import run_with_layout
from daceml_train.runtime.executable import Executable


@dataclass
class Denominators:
    """The divisors of the parts' losses: computed on a whole batch into `held`, which the parts' programs read."""

    executable: Executable
    inputs: list[tuple[int | None, torch.Tensor]]
    """Per input of the program: the position of an argument, or None, and the tensor when it was bound."""
    held: list[torch.Tensor]

    def refresh(self, flat: Sequence[Any]) -> None:
        """Compute them for the whole batch with these arguments."""
        given = [held if position is None else flat[position] for position, held in self.inputs]
        with torch.no_grad():
            for target, value in zip(self.held, run_with_layout(self.executable, given), strict=True):
                target.copy_(value)
