"""The code of a hand-written kernel: a launch of a function template in `native/`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from daceml_train.codegen.cpu.launch import KernelCode, generator_version
from daceml_train.tensor import Dim, simplify, symbol


def launch_of(
    header: str, call: str, integers: Sequence[Dim], rows: Dim, work: Dim, scratch: Sequence[Dim] = (), text: str = ""
) -> KernelCode:
    """A launch of `<call>(pointers, integers)` from `native/<header>`.

    The number of blocks precedes the integers; it is at most `rows`, and `work` counts element-operations.
    `text` is C++ that the call refers to.
    """
    key = hashlib.sha256(f"{header} {call}\n{text}\n{generator_version()}".encode()).hexdigest()[:20]
    head = f"void kernel_{key}(void** pointers, const int64_t* integers)"
    lines = [f'#include "{header}"', "", *([text, ""] if text else [])]
    lines += [f'extern "C" __attribute__((visibility("default"))) {head} {{', f"    {call}(pointers, integers);", "}"]
    numbers, source = (symbol("blocks"), *integers), "\n".join([*lines, ""])
    return KernelCode(key, numbers, tuple(map(simplify, scratch)), simplify(rows), simplify(work), None, source)
