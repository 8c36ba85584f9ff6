"""How far a result may be from eager execution's: rounding, for functions that are not exact in eager either."""

from __future__ import annotations

from typing import Any

from benchmarks.conformance.special import by_element

ULPS, SUM = 64, 256
"""Units in the last place: of an element's own value, and of the largest element for what adds elements up."""


def limit(op: Any) -> int:
    """What is allowed for an entry; negative: of the largest element, as the order of a sum is nobody's."""
    return ULPS if by_element(op) else -SUM
