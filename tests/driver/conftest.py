"""Fixtures of the driver's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes; modules that need another number have a fixture of their own."""
    result = Ranks(tmp_path_factory.mktemp("ranks"), 4)
    yield result
    result.close()
