"""Identity of kernels, symbolic sizes, and what generation costs."""

import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch

from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import Layout, block_count, generate, generator_files
from daceml_train.tensor import DType, Tensor, contiguous_strides, symbol
from tests.codegen import groups
from tests.codegen.running import FOLDER, describe, kernel_of, run, wide


def dense(t: Tensor) -> Layout:
    return Layout(t.shape, contiguous_strides(t.shape), t.dtype)


def code_of(body, *tensors: Tensor):
    kernel = kernel_of(body, *tensors)
    return kernel, generate(kernel, [*map(dense, tensors)], [dense(t) for t in kernel.infer(*tensors)])


def key(body, *shapes, dtype=DType.float32) -> str:
    return code_of(body, *(Tensor(s, dtype) for s in shapes))[1].key


def test_every_source_of_the_generator_is_part_of_the_key():
    folder = Path(__file__).parents[2] / "daceml_train" / "codegen"
    sources = {path for suffix in ("py", "h") for path in folder.glob(f"*/**/*.{suffix}")}
    assert {p for p in sources if p.relative_to(folder).parts[0] != "cuda"} == set(generator_files())


def test_sizes_and_large_constants_are_not_part_of_the_key():
    assert key(groups.layer_norm, (8, 32), (32,), (32,)) == key(groups.layer_norm, (64, 768), (768,), (768,))
    assert key(lambda x: x * 0.1234, (8, 32)) == key(lambda x: x * 0.77, (9, 31))
    assert key(lambda x: x + 1.0, (8, 32)) == key(lambda x: x + 1.0, (2, 3, 4, 5))


def test_structure_is_part_of_the_key():
    keys = {
        key(lambda x: x + 1.0, (8, 32)),
        key(lambda x: x + 2.0, (8, 32)),
        key(lambda x: x - 1.0, (8, 32)),
        key(lambda x: x + 1.0, (8, 32), dtype=DType.float64),
        key(lambda x, y: x + y, (8, 32), (8, 32)),
        key(lambda x, y: x + y, (8, 32), (32,)),
        key(lambda x, y: x + y, (8, 32), (8, 1)),
        key(lambda x: x.sum((0,)), (8, 32)),
        key(lambda x: x.sum((1,)), (8, 32)),
        key(lambda x: x.reduce("max", (1,)), (8, 32)),
    }
    assert len(keys) == 10


@pytest.mark.compiled
def test_one_kernel_serves_symbolic_sizes():
    n, d = symbol("n"), symbol("d")
    kernel, code = code_of(
        groups.layer_norm_backward, Tensor((n, d)), Tensor((n, d)), Tensor((d,)), Tensor((n, 1)), Tensor((n, 1))
    )
    assert {str(s) for i in code.integers for s in sympy.sympify(i).free_symbols} == {"n", "d", "blocks"}
    address = load(compile_kernels([code], FOLDER)[code.key], code.key)
    for rows, lanes in ((3, 5), (40, 17), (1, 200), (300, 64)):
        r = torch.randn
        inputs = [r(rows, lanes), r(rows, lanes), r(lanes), r(rows, 1), r(rows, 1)]
        concrete = kernel_of(groups.layer_norm_backward, *map(describe, inputs))
        outputs = [torch.empty(rows, lanes), torch.empty(lanes), torch.empty(lanes)]
        run(code, address, kernel, inputs, outputs, blocks=2, n=rows, d=lanes)
        for got, want in zip(outputs, concrete.evaluate(*map(wide, inputs)), strict=True):
            torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
def test_symbolic_views():
    b, t = symbol("b"), symbol("t")
    kernel, code = code_of(lambda x: (x.view((b, t, 4, 8)).permute((0, 2, 1, 3)) * 2.0).sum((3,)), Tensor((b * t, 32)))
    address = load(compile_kernels([code], FOLDER)[code.key], code.key)
    x = torch.randn(15, 32)
    y = torch.empty(3, 4, 5)
    run(code, address, kernel, [x], [y], b=3, t=5)
    torch.testing.assert_close(y, (x.view(3, 5, 4, 8).permute(0, 2, 1, 3) * 2).sum(3))


def test_blocks():
    assert block_count(rows=1000, work=10**8, threads=8) == 8
    assert block_count(rows=3, work=10**8, threads=8) == 3
    assert block_count(rows=1000, work=1000, threads=8) == 1
    assert block_count(rows=0, work=0, threads=8) == 1


def test_a_key_costs_no_dace():
    """A kernel that is on disk is loaded without DaCe, whose import alone takes a second."""
    program = """
import sys
from tests.codegen.test_keys import key, groups
key(groups.layer_norm, (8, 32), (32,), (32,))
assert not any(m == "dace" or m.startswith("dace.") for m in sys.modules), "dace was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.compiled
def test_nothing_is_printed_or_left(tmp_path):
    program = """
from tests.codegen.test_keys import code_of, groups, Tensor
code_of(groups.layer_norm, Tensor((8, 32)), Tensor((32,)), Tensor((32,)))[1].source
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(root),
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "DACEML_TRAIN_CACHE": str(tmp_path),
        },
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "" and result.stderr == ""
    assert not list(tmp_path.rglob(".dacecache"))
