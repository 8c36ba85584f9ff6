"""The code of a kernel that is written by hand: a launch of a function template in `native/`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from daceml_train.codegen.launch import KernelCode, generator_version
from daceml_train.tensor import Dim, simplify, symbol


def launch_of(
    header: str, call: str, integers: Sequence[Dim], rows: Dim, work: Dim, scratch: Sequence[Dim] = ()
) -> KernelCode:
    """A launch of `<call>(pointers, integers)` from `native/<header>`.

    The number of blocks goes in front of the integers; it is at most `rows`, and `work` counts element-operations.
    """
    key = hashlib.sha256(f"{header} {call}\n{generator_version()}".encode()).hexdigest()[:20]
    head = f"void kernel_{key}(void** pointers, const int64_t* integers)"
    text = f'#include "{header}"\n\nextern "C" __attribute__((visibility("default"))) {head} {{\n'
    text += f"    {call}(pointers, integers);\n}}\n"
    numbers = (symbol("blocks"), *integers)
    return KernelCode(key, numbers, tuple(map(simplify, scratch)), simplify(rows), simplify(work), None, text)
