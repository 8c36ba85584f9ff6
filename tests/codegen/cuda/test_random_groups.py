"""Random fusion groups: whatever is not refused computes in CUDA what its body says, in any order of its threads."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.codegen.cuda.running import check
from tests.codegen.test_random_groups import group

pytestmark = pytest.mark.compiled


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1_000_000))
def test_random_groups(seed):
    check([c for c in map(group, range(seed, seed + 10)) if c is not None])
