"""Source: the C++ text of a kernel, from its SDFG by DaCe's code generator."""

from __future__ import annotations

from typing import Any

from daceml_train.codegen.cpu.schedule import BlockGenerator, LaneGenerator
from daceml_train.codegen.cpu.sdfg import build
from daceml_train.codegen.kernel.frame import generate, generating
from daceml_train.codegen.kernel.loops import SQUARE
from daceml_train.codegen.kernel.plan import Plan


def source(plan: Plan, key: str) -> str:
    """The C++ text with the entry point `kernel_<key>`."""
    with generating():
        sdfg = build(plan, f"body_{key}")
        text, arguments = generate(sdfg, _targets)
    headers = ["kernel.h", *(["random.h"] if "vm::random_key" in text else [])]
    head = "".join(f'#include "{header}"\n' for header in headers)
    return f"{head}\n{text}\n{entry(plan, sdfg, arguments, key)}"


def _targets(frame: Any, sdfg: Any) -> None:
    BlockGenerator(frame, sdfg)
    LaneGenerator(frame, sdfg)


def entry(plan: Plan, sdfg: Any, passed: list[str], key: str) -> str:
    """The function that unpacks pointers and integers."""
    head = f"void kernel_{key}(void** pointers, const int64_t* integers) {{"
    lines = [f'extern "C" __attribute__((visibility("default"))) {head}', "    int64_t blocks = integers[0];"]
    arguments: dict[str, str] = {"blocks": "blocks"}
    for position, (name, _) in enumerate(plan.integers().items(), 1):
        arguments[name] = f"vm::bits64(integers[{position}])" if name in plan.values.reals else f"integers[{position}]"
    inputs, outputs = len(plan.loops.operands), sum(r.target is None for r in plan.loops.domain.results)
    base = {"input": 0, "output": inputs, "scratch": inputs + outputs}
    for name, array in plan.arrays.named.items():
        kind, position = array.pointer
        ctype = sdfg.arrays[name].dtype.ctype
        offset = f" + {arguments[f'{name}_offset']}" if f"{name}_offset" in arguments else ""
        arguments[name] = f"({ctype}*)pointers[{base[kind] + position}]{offset}"
    if plan.loops.mode == "flat":
        sizes = [arguments[f"{a.name}_size"] for a in plan.loops.row_axes]
        if plan.loops.squares:
            sizes[-1] = f"vm_groups({sizes[-1]}, {SQUARE})"
        rows = " * ".join(sizes) or "1"
        lines += [
            f"    const int64_t rows = {rows};",
            "    const int64_t lane_blocks = rows >= blocks || rows < 1 ? 1 : (blocks + rows - 1) / rows;",
            "    blocks = blocks / lane_blocks * lane_blocks;",
        ]
        arguments["lane_blocks"] = "lane_blocks"
    texts = ", ".join(arguments[name] for name in passed)
    return "\n".join([*lines, f"    __program_{sdfg.name}_internal({texts});", "}", ""])
