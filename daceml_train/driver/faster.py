"""Whether compiled pieces are worth it: some calls run them, some run the model as PyTorch does, and both are timed."""

from __future__ import annotations

WARM, TIMED = 6, 6
"""So many calls compile and settle; of so many after them every second one runs without the pieces."""


class Faster:
    """Counts and times the calls of a step in pieces."""

    def __init__(self, compiled: bool | None = None) -> None:
        self.calls = 0
        self.compiled = compiled
        """Whether the compiled pieces are faster, once that is known."""
        self.best = {True: float("inf"), False: float("inf")}
        """The fastest call in seconds, with the compiled pieces and without."""

    def takes_pieces(self) -> bool:
        """Whether the next call runs the compiled pieces."""
        return self.compiled if self.compiled is not None else self.calls < WARM or self.calls % 2 == 0

    def ran(self, compiled: bool, seconds: float) -> bool:
        """Note a call; whether it has settled that PyTorch is faster."""
        self.calls += 1
        if self.compiled is not None or self.calls <= WARM:
            return False
        self.best[compiled] = min(self.best[compiled], seconds)
        if self.calls < WARM + TIMED:
            return False
        self.compiled = self.best[True] <= self.best[False]
        return not self.compiled
