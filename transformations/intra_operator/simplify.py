"""Simplify: operators that change nothing are taken out, and what only renames indices is joined."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.transformations.intra_operator.arithmetic import ARITHMETIC
from daceml_train.transformations.intra_operator.movement import MOVEMENT
from daceml_train.transformations.intra_operator.peephole import Peephole, Rules


@dataclass(frozen=True)
class Simplify(Peephole):
    """Exact identities; each rule's docstring draws it.

        x -> [view] -> [view] -> y      =>      x -> [view] -> y
        x -> [mul 1] -> y               =>      x = y

    The bytes never grow; they shrink by what an operator read and wrote that is gone.
    """

    def rules(self) -> Rules:
        return _RULES


_RULES: Rules = {**MOVEMENT, **ARITHMETIC}
