"""Compilers for this processor's vectors and for all shorter ones, which other processors have."""

import platform

import pytest

from daceml_train.codegen.compiler import compiler_command
from daceml_train.processor import vector_bytes

SHORTER = {64: "-mno-avx512f", 32: "-mno-avx"}
"""Bytes of a vector -> the option after which there are none of them; the order is that of the options' strength."""


@pytest.fixture(params=["", *(option for width, option in SHORTER.items() if vector_bytes() >= width)])
def compiler(request: pytest.FixtureRequest) -> str:
    if request.param and platform.machine() != "x86_64":
        pytest.skip("an option for x86")
    return " ".join([*compiler_command(), request.param])
