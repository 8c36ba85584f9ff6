"""What was learned of the user's lines: which allocate what results change, and which index by integers that change."""

from __future__ import annotations

from typing import Any

from daceml_train.frontends.torch.paths.values import place

Site = tuple[Any, str]
"""A function of PyTorch and the user's line that calls it."""


class Sites:
    """How calls of PyTorch's functions are followed, by function and line."""

    def __init__(self) -> None:
        self.looks: set[Any] = set()
        """Functions that turned out to look at values."""
        self._changed: dict[Any, set[str]] = {}
        self._varying: dict[Any, set[str]] = {}
        self._fixed: set[Site] = set()

    def of(self, function: Any) -> Site:
        """The line that is running."""
        return function, place()

    def changes(self, function: Any) -> bool:
        """Whether this line allocates data that results change in place."""
        places = self._changed.get(function)
        return places is not None and place() in places

    def change(self, site: Site) -> None:
        """From now on, what this line allocates is a result."""
        self._changed.setdefault(site[0], set()).add(site[1])

    def varies(self, function: Any) -> bool:
        """Whether the integers of this line's index are data."""
        places = self._varying.get(function)
        return places is not None and place() in places

    def vary(self, function: Any) -> bool:
        """From now on, the integers of this line's index are data; false where that was taken back."""
        site = self.of(function)
        if site not in self._fixed:
            self._varying.setdefault(function, set()).add(site[1])
        return site not in self._fixed

    def fix(self, site: Site) -> bool:
        """From now on, they are parts of paths; false if they were."""
        self._fixed.add(site)
        known = self._varying.get(site[0], set())
        varied = site[1] in known
        known.discard(site[1])
        return varied
