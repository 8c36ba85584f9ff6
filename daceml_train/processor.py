"""Processor: what this machine's processor is called, which vectors it has, and all that `-march=native` depends on.

Machines of one name can differ: hypervisors hide the model, and "AMD EPYC" has vectors of 32 bytes or of 64.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FEATURES = {"avx512f": "AVX-512", "avx512_bf16": "bf16", "amx_tile": "AMX"}
"""Flag of the system -> what it is called where it goes beyond AVX2."""
ARM = ("aarch64", "arm64")


@functools.cache
def cpuinfo() -> dict[str, str]:
    """The fields that the system has of the first processor; none where it does not say."""
    try:
        first = CPUINFO.read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    parts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): text.strip() for name, _, text in parts}


def instructions() -> frozenset[str]:
    """The extensions of the instruction set, as Linux calls them."""
    return frozenset((cpuinfo().get("flags") or cpuinfo().get("Features", "")).split())


def described() -> str:
    """The processor and its widest vectors, such as `AMD EPYC, AVX-512 bf16`: what measured times are valid for."""
    name = cpuinfo().get("model name") or platform.processor() or platform.machine()
    beyond = " ".join(title for flag, title in FEATURES.items() if flag in instructions())
    widest = beyond or ("AVX2" if "avx2" in instructions() else "")
    return f"{name}, {widest}" if widest else name


def properties() -> str:
    """All that the compiler's `-march=native` may depend on."""
    wanted = ("flags", "Features", "model name", "cpu family", "model")
    return "\n".join([platform.machine(), *(f"{name}: {cpuinfo()[name]}" for name in wanted if name in cpuinfo())])


def vector_bytes() -> int:
    """Bytes of the widest vector that kernels compute with, as in `native/vectors.h`."""
    if "avx512f" in instructions():
        return 64
    return 32 if "avx" in instructions() else 16


def vector_registers() -> int:
    """How many vectors the processor has registers for, as in `native/vectors.h`."""
    return 32 if "avx512f" in instructions() or platform.machine() in ARM else 16
