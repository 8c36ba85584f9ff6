"""Times of the levels of a recursion."""

from typing import Any

import pytest

import daceml_train as dt
from tests.driver.test_recursion_limits import Node, Sum


@pytest.mark.compiled
def test_levels_have_their_calls_and_times() -> None:
    compiled: Any = dt.optimize(Sum())
    roots = [Node(0, Node(1), Node(0, Node(2), Node(3))), Node(0, Node(1), Node(2))]
    compiled(roots)
    with dt.debug.level_times() as found:
        compiled(roots).sum().backward()
    compiled(roots)
    forward, backward = found
    # equal leaves are one row
    assert (forward.rows, forward.backward) == ((3, 2, 1), False)
    assert (backward.rows, backward.backward) == ((1, 2, 3), True)
    assert len(forward.seconds) == len(backward.seconds) == 3
    assert min(*forward.seconds, *backward.seconds) > 0
