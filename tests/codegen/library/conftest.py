"""Compilers for this processor's vectors and for all shorter ones, which other processors have."""

import pytest

from daceml_train.codegen.compiler import compiler_command
from daceml_train.processor import vector_bytes

SHORTER = {64: "-mno-avx512f", 32: "-mno-avx"}
"""Bytes of a vector, which only x86 has -> the option after which there are none of them."""


@pytest.fixture(params=["", *(option for width, option in SHORTER.items() if vector_bytes() >= width)])
def compiler(request: pytest.FixtureRequest) -> str:
    return " ".join([*compiler_command(), request.param])
