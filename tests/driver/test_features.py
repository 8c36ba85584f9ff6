"""Everything in the table of features trains as it does in eager execution, as a module and as a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.driver import features_autograd, features_models  # noqa: F401 - they fill the table
from tests.driver.features import FEATURES, Feature
from tests.driver.holding import hold_module, hold_step

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:daceml_train runs"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def entries(wide: Callable[[Feature], bool]) -> list[Any]:
    return [pytest.param(f, marks=[pytest.mark.wide] * wide(f), id=n) for n, f in FEATURES.items()]


@pytest.mark.parametrize("feature", entries(lambda f: f.wide))
def test_module(feature: Feature) -> None:
    hold_module(feature.make, feature.arguments, breaks=feature.module, tolerance=feature.tolerance)


@pytest.mark.parametrize("feature", entries(lambda f: not f.stepped))
def test_step(feature: Feature) -> None:
    hold_step(feature.make, feature.arguments, breaks=feature.step, tolerance=feature.tolerance)
