"""Simplify: operators that change nothing are removed, and operators that only rename indices are merged."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.transformations.intra_operator.arithmetic import ARITHMETIC
from daceml_train.transformations.intra_operator.movement import MOVEMENT
from daceml_train.transformations.intra_operator.peephole import Peephole, Rules


@dataclass(frozen=True)
class Simplify(Peephole):
    """Apply exact algebraic identities; each rule's docstring draws one.

        x -> [view] -> [view] -> y      =>      x -> [view] -> y
        x -> [mul 1] -> y               =>      x = y

    The bytes never grow; they shrink by what the removed operators read and wrote.
    """

    def rules(self) -> Rules:
        return _RULES


_RULES: Rules = {**MOVEMENT, **ARITHMETIC}
