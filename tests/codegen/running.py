"""Compile and run kernels on torch tensors, and compare them with their NumPy meaning."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import KernelCode, Layout, block_count, generate
from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import Value
from daceml_train.storage.folders import cache_folder
from daceml_train.tensor import Dim, DType, Tensor

TORCH = {
    DType.float32: torch.float32,
    DType.float64: torch.float64,
    DType.bfloat16: torch.bfloat16,
    DType.float16: torch.float16,
    DType.int64: torch.int64,
    DType.int32: torch.int32,
    DType.int16: torch.int16,
    DType.int8: torch.int8,
    DType.uint8: torch.uint8,
    DType.bool: torch.bool,
}
DTYPES = {there: here for here, there in TORCH.items()}
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
FOLDER = cache_folder() / "kernels"
BEYOND = 1 << 18
"""Bytes after a scratch array that must stay as they are."""
Body = Callable[..., Value | Sequence[Value]]


def kernel_of(body: Body, *tensors: Tensor) -> Kernel:
    """A kernel whose body is the leaves that `body` emits."""
    graph = Graph()
    result = body(*(graph.input(f"a{i}", t) for i, t in enumerate(tensors)))
    graph.output(*([result] if isinstance(result, Value) else result))
    flat = leaves(graph).graph
    return Kernel(
        tuple(flat.inputs), tuple(Statement(n.op, n.inputs, n.outputs) for n in flat.nodes), tuple(flat.outputs)
    )


def describe(x: torch.Tensor) -> Tensor:
    return Tensor(tuple(x.shape), DTYPES[x.dtype])


def layout(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), tuple(x.stride()), DTYPES[x.dtype])


def number(size: Dim, **symbols: int) -> int:
    if isinstance(size, int):
        return size
    return int(size.subs({s: symbols[s.name] for s in size.free_symbols}))


@dataclass
class Case:
    """A kernel with inputs; results are allocated here, dense unless `outputs` gives them."""

    name: str
    kernel: Kernel
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    tolerance: float = 3e-6
    blocks: int = 0
    code: KernelCode | None = None

    def __post_init__(self) -> None:
        types = self.kernel.infer(*map(describe, self.inputs))
        targets = dict(self.kernel.updates)
        if not self.outputs:
            self.outputs = [
                self.inputs[targets[i]]
                if i in targets
                else torch.full(tuple(map(int, t.shape)), 77, dtype=TORCH[t.dtype])
                for i, t in enumerate(types)
            ]
        self.expected = self.kernel.evaluate(*(wide(x) for x in self.inputs))
        self.code = generate(self.kernel, [*map(layout, self.inputs)], [*map(layout, self.outputs)])

    def call(self, address: int, threads: int = 2) -> None:
        run(self.code, address, self.kernel, self.inputs, self.outputs, self.blocks, threads)

    def worst(self) -> float:
        """The largest error, relative to 1 + the value; infinite if NaN or infinity differ."""
        worst = 0.0
        for got, want in zip(self.outputs, self.expected, strict=True):
            have = wide(got).astype(np.float64)
            want = np.broadcast_to(np.asarray(want, np.float64), have.shape)
            special = ~np.isfinite(have) | ~np.isfinite(want)
            if not np.array_equal(have[special], want[special], equal_nan=True):
                return float("inf")
            error = np.abs(have - want)[~special] / (1 + np.abs(want[~special]))
            worst = max(worst, float(error.max(initial=0.0)))
        return worst


def wide(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return (x.double() if x.dtype.is_floating_point else x).numpy().copy()


def run(
    code: KernelCode,
    address: int,
    kernel: Kernel,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    blocks: int = 0,
    threads: int = 2,
    **symbols: int,
) -> None:
    """Call a compiled kernel once."""
    bind(code, address, kernel, inputs, outputs, blocks, threads, **symbols)()


def bind(
    code: KernelCode,
    address: int,
    kernel: Kernel,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    blocks: int = 0,
    threads: int = 2,
    **symbols: int,
) -> Callable[[], None]:
    """A call without arguments of a compiled kernel."""
    blocks = blocks or block_count(number(code.rows, **symbols), number(code.work, **symbols), threads)
    known = {"blocks": blocks, **symbols}
    integers = (ctypes.c_int64 * len(code.integers))(*(number(i, **known) for i in code.integers))
    scratch = [torch.full((number(s, **known) + 64,), 255, dtype=torch.uint8) for s in code.scratch]
    updated = {i for i, _ in kernel.updates}
    memory = [*inputs, *(x for i, x in enumerate(outputs) if i not in updated), *scratch]
    pointers = (ctypes.c_void_p * max(1, len(memory)))(*(x.data_ptr() for x in memory))
    function = FUNCTION(address)

    def call(_keep: object = (memory, scratch)) -> None:
        function(pointers, integers)

    return call


def check(cases: Sequence[Case]) -> None:
    """Compile all, run each, and report every one that is wrong."""
    paths = compile_kernels([c.code for c in cases], FOLDER, jobs=2)
    wrong: list[str] = []
    for case in cases:
        case.call(load(paths[case.code.key], case.code.key))
        error = case.worst()
        if not error <= case.tolerance:
            wrong.append(f"{case.name}: {error:.3g}")
    assert not wrong, "\n".join(wrong)


def launch(code: KernelCode, path: Path, tensors: Sequence[torch.Tensor], blocks: int) -> None:
    """Run code whose only symbol is the number of blocks: operands, then results. It stays within its scratch."""
    sizes = [number(size, blocks=blocks) for size in code.scratch]
    scratch = [torch.full((size + BEYOND,), 255, dtype=torch.uint8) for size in sizes]
    memory = [*tensors, *scratch]
    pointers = (ctypes.c_void_p * len(memory))(*(x.data_ptr() for x in memory))
    integers = (ctypes.c_int64 * len(code.integers))(*(number(i, blocks=blocks) for i in code.integers))
    FUNCTION(load(path, code.key))(pointers, integers)
    assert all((x[size:] == 255).all() for x, size in zip(scratch, sizes, strict=True)), "beyond its scratch"
