"""Each family of CUDA kernels in the emulator, against its NumPy meaning in float64."""

import pytest

from tests.codegen.cuda.running import check
from tests.codegen.test_families import families

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("shape", [(23, 52), pytest.param((5, 130), marks=pytest.mark.wide)])
def test_families(shape):
    check(families(*shape, 1))
