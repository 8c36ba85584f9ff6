"""Source: the CUDA text of a kernel, from its SDFG by DaCe's code generator.

One namespace per kernel, `k_<key>`, so the kernels of a program share one file. Device code is a template over WIDE:
the host function `launch_<key>` selects accesses of 16 bytes if all pointers and strides permit, else of single
elements.
"""

from __future__ import annotations

import re
from typing import Any

from daceml_train.codegen.cuda.plan import CudaPlan, Half
from daceml_train.codegen.cuda.schedule import BlockGenerator, ThreadGenerator
from daceml_train.codegen.cuda.sdfg import CudaBuilder
from daceml_train.codegen.kernel.frame import generate, generating
from daceml_train.tensor import same

_STRUCT = """template <bool WIDE> struct Device {{
    static constexpr int V = {width}, THREADS = {threads}, TEAM = {team}, TEAMS = {teams}, PASSES = {fragments};
    static constexpr int CAPACITY = {capacity};
    static constexpr bool RAGGED = {ragged};
    VM int vm_member() {{ return (int)threadIdx.x % TEAM; }}
    VM int vm_team() {{ return (int)threadIdx.x / TEAM; }}
    VM int64_t vm_width() {{ return V; }}
"""


def source(plan: CudaPlan, key: str) -> str:
    """The text of a kernel, with its entry `launch_<key>`."""
    with generating():
        builder = CudaBuilder(plan, "body")
        functions, kernels, host, passed = _generate(builder)
    g = plan.geometry
    struct = _STRUCT.format(
        width=g.width,
        threads=g.threads,
        team=g.team,
        teams=g.teams,
        fragments=g.fragments,
        capacity=g.capacity,
        ragged=str(g.ragged).lower(),
    )
    types = _types(plan, builder.top)
    texts = [f"namespace k_{key} {{\n", struct, functions, "};\n"]
    apart = plan.halves is not None
    for number, (name, threads, body) in enumerate(kernels):
        used = [a for a in passed if re.search(rf"\b{a}\b", body)]
        signature = ", ".join(f"{types[a]} {a}" for a in used)
        texts.append(
            f"template <bool WIDE> __global__ void __launch_bounds__({threads}) {name}({signature}) {{\n"
            f"    const int64_t block = blockIdx.x;\n{_calls(body, name)}\n}}\n"
        )
        wide = "false" if name.startswith(("scalars", "columns")) else "WIDE"
        wanted = f" && part & {1 << number}" if apart else ""
        call = f"if (!error{wanted}) error = vm::launch({name}<{wide}>, \\1, {threads}, stream, {', '.join(used)});"
        host = re.sub(rf"LAUNCH\({name}, (.*), \d+\)", call.replace(", );", ");"), host)
    arguments = ", ".join(f"{types[a]} {a}" for a in passed)
    own = ["void* stream", *(["int part"] if apart else [])]
    texts.append(f"template <bool WIDE> static int run({', '.join(filter(None, [arguments, *own]))}) {{\n")
    texts.append(f"    int error = 0;\n{host}\n    return error;\n}}\n}}  // namespace k_{key}\n\n")
    return "".join(texts) + entry(plan, passed, types, key)


def _calls(body: str, kernel: str) -> str:
    """Calls of device functions, which depend on the width."""
    wide = "false" if kernel.startswith(("scalars", "columns")) else "WIDE"
    return re.sub(r"\bbody_", f"Device<{wide}>::body_", body)


def _generate(builder: CudaBuilder) -> tuple[str, list[tuple[str, int, str]], str, list[str]]:
    """Device functions, kernels, host code, and their arguments."""
    sdfg: Any = builder.top
    blocks: Any = None

    def targets(frame: Any, sdfg: Any) -> None:
        nonlocal blocks
        blocks = BlockGenerator(frame, sdfg)
        ThreadGenerator(frame, sdfg, builder.geometry, builder.conditions, builder.plan.narrow)

    text, passed = generate(sdfg, targets)
    start = text.index(f"void __program_{sdfg.name}_internal(")
    functions, host = text[:start], text[start:]
    functions = re.sub(r"^inline void", "VM void", functions, flags=re.MULTILINE)
    host = host[host.index("{") + 1 : host.rindex("}")]
    kernels = [(n, t, re.sub(r"__state, |[ \t]*////__DACE:[^\n]*", "", b)) for n, t, b in blocks.kernels]
    return functions, kernels, host.strip("\n"), passed


def _types(plan: CudaPlan, sdfg: Any) -> dict[str, str]:
    """The C++ type of every argument."""
    types = {name: f"{sdfg.arrays[name].dtype.ctype}* __restrict__" for name in plan.arrays.named}
    return types | {name: "double" if name in plan.values.reals else "int64_t" for name in _symbols(plan)}


def _symbols(plan: CudaPlan) -> list[str]:
    return ["blocks", "tiles", "parts", *plan.integers()]


def entry(plan: CudaPlan, passed: list[str], types: dict[str, str], key: str) -> str:
    """The host function: it unpacks pointers and integers, and chooses the width."""
    g, loops, halves = plan.geometry, plan.loops, plan.halves
    signature = "void** pointers, const int64_t* integers, void* stream"
    lines = [f'extern "C" VM_EXPORT int launch_{key}({signature}) {{']
    if halves is not None:
        lines = [f"static int start_{key}({signature}, int part) {{"]
    lines.append("    const int64_t blocks = integers[0];")
    for position, (name, _) in enumerate(plan.integers().items(), 1):
        kind = "double" if name in plan.values.reals else "int64_t"
        value = f"integers[{position}]"
        lines.append(f"    const {kind} {name} = {f'vm::bits64({value})' if kind == 'double' else value};")
    known = plan.integers()
    for name, array in plan.arrays.named.items():
        ctype = types[name].removesuffix("* __restrict__")
        offset = f" + {name}_offset" if f"{name}_offset" in known else ""
        lines.append(f"    {ctype}* {name} = ({ctype}*)pointers[{plan.position(array)}]{offset};")
    lanes = " * ".join(f"{a.name}_size" for a in loops.lane_axes) or "1"
    cut = loops.mode == "tiles" or g.tiled
    lines.append(f"    const int64_t tiles = {f'vm_tiles({lanes}, {g.capacity})' if cut else '1'};")
    lines.append("    const int64_t parts = blocks < tiles ? 1 : blocks / tiles;")
    texts = ", ".join([*passed, "stream", *(["part"] if halves is not None else [])])
    if g.width > 1:
        lines.append(f"    const bool wide = {' && '.join(_conditions(plan))};")
        lines.append(f"    if (wide) return k_{key}::run<true>({texts});")
    lines += [f"    return k_{key}::run<false>({texts});", "}"]
    for number, half in enumerate(halves or ()):
        lines += _entry_of_part(plan, key, number, half, signature)
    if halves is not None:
        lines.append(f'extern "C" VM_EXPORT int launch_{key}({signature}) {{')
        lines += [f"    return start_{key}(pointers, integers, stream, 3);", "}"]
    return "\n".join([*lines, ""])


def _entry_of_part(plan: CudaPlan, key: str, number: int, half: Half, signature: str) -> list[str]:
    """The host function of one of two launches, which takes the pointers that it touches."""
    places, count = plan.positions(half.arrays), 1 + max(plan.positions(plan.arrays.named))
    pointers = [f"pointers[{places.index(p)}]" if p in places else "nullptr" for p in range(count)]
    return [
        f'extern "C" VM_EXPORT int launch_{key}_{number}({signature}) {{',
        f"    void* all[] = {{{', '.join(pointers)}}};",
        f"    return start_{key}(all, integers, stream, {1 << number});",
        "}",
    ]


def _conditions(plan: CudaPlan) -> list[str]:
    """Conditions for aligned fragments: on sizes, and on pointers and strides of arrays contiguous along the lanes."""
    loops, width = plan.loops, plan.geometry.width
    inner, known = loops.lane_axes[-1].name, plan.integers()
    found: dict[str, None] = {}
    for name, array in plan.arrays.named.items():
        if inner not in array.axes:
            continue
        strides = dict(zip(array.axes, array.strides, strict=True))
        scratch = array.pointer[0] == "scratch"
        if not scratch and not same(strides[inner], 1):
            continue
        found[f"vm::aligned({name}, {width})"] = None
        if scratch and len(array.axes) > 1:  # rows of all lanes
            found[f"{inner}_size % {width} == 0"] = None
        for axis in () if scratch else array.axes:
            if axis != inner and f"{name}_{axis}" in known:
                found[f"{name}_{axis} % {width} == 0"] = None
            elif axis != inner:  # a stride of 1
                found["false"] = None
    return list(found)
