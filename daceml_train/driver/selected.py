"""What a step selects by the values of its arguments, at each call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, InputSource
from daceml_train.frontends.torch.capture.selections import Selection


@dataclass(frozen=True)
class SelectedInputs:
    """The inputs of a bound step's program that a selection computes."""

    selection: Selection
    operands: Mapping[int, int | torch.Tensor]
    """What the selection reads: positions of the call's arguments, and buffers."""
    places: tuple[tuple[int, int], ...]
    """Positions of the program's inputs, and the selection's results that they are."""

    @staticmethod
    def of(
        captured: Captured,
        by_name: Mapping[str, torch.Tensor],
        given: Mapping[int, int],
        known: Collection[int],
        inputs: Sequence[str],
    ) -> SelectedInputs | None:
        """The inputs of a program that the captured graph's selection computes; None if it has no selection.

        `given` is the position of an argument by its identity, `known` has the identities of tensors that remain the
        same. Raises `Unsupported` for a selection by other tensors.
        """
        selection = captured.selection
        if selection is None:
            return None
        sources = {source.position: source for source in captured.inputs if source.position is not None}
        operands: dict[int, int | torch.Tensor] = {}
        for position in selection.positions:
            tensor = by_name[sources[position].name]
            if id(tensor) not in given and id(tensor) not in known:
                raise Unsupported(f"a size that depends on the values of {sources[position].source}")
            operands[position] = given.get(id(tensor), tensor)
        results = {source.name: _result(selection, source) for source in captured.inputs}
        places = ((place, results[name]) for place, name in enumerate(inputs) if name in results)
        return SelectedInputs(selection, operands, tuple((p, r) for p, r in places if r is not None))

    def __call__(self, flat: Sequence[Any]) -> tuple[list[tuple[int, torch.Tensor]], str]:
        """By position of an input its tensor, for a call's arguments; then why the program may not run, if so."""
        operands = {at: flat[entry] if isinstance(entry, int) else entry for at, entry in self.operands.items()}
        results = self.selection(operands)
        return [(place, results[result]) for place, result in self.places], self.selection.misfit(results)


def _result(selection: Selection, source: InputSource) -> int | None:
    position = source.position
    return None if position is None or position < selection.first else position - selection.first
