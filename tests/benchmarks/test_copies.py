"""Training steps copy next to nothing: new values are stored over old ones."""

from __future__ import annotations

import pytest

from benchmarks.copies import copies
from benchmarks.networks import TWELVE

pytestmark = [pytest.mark.slow, pytest.mark.compiled]


@pytest.mark.parametrize(("name", "target", "autocast"), [("gpt2", "cpu", False), ("gpt2", "cuda", True)])
def test_copies(name: str, target: str, autocast: bool) -> None:
    found = copies(TWELVE[name], target, autocast, small=True)
    assert found.copies <= 5 and found.copied < 0.01 * found.bytes, found
    assert found.launches > 40
