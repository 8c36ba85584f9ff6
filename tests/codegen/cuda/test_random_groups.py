"""Random fusion groups: whatever is not refused computes in CUDA what its body says, in any order of its threads."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.codegen.cuda.running import check
from tests.codegen.test_random_groups import group

pytestmark = pytest.mark.compiled


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1_000_000))
def test_random_groups(seed):
    check([c for c in map(group, range(seed, seed + 10)) if c is not None], apart=bool(seed % 2))


@pytest.mark.wide
@pytest.mark.parametrize("first", range(0, 400, 25))
def test_many_random_groups(first):
    check([c for c in map(group, range(first, first + 25)) if c is not None], apart=bool(first % 2))
