"""What is counted in the machine code of a network's kernels, and the page of it."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_code
from benchmarks.networks import TWELVE
from daceml_train.codegen.cuda.compile import find_nvcc, find_tool
from daceml_train.errors import CompilerError

try:
    TOOLS = find_nvcc() and find_tool("nvdisasm")
except CompilerError:
    TOOLS = None


def test_what_ptxas_says_is_of_the_kernel_that_it_names() -> None:
    message = """
ptxas info    : Compiling entry function '_ZN5k_abc5rows0ILb1EEEvPf' for 'sm_90'
ptxas info    : Function properties for _ZN5k_abc5rows0ILb1EEEvPf
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN5k_abc8columns1ILb0EEEvPf' for 'sm_90'
ptxas info    : Function properties for __internal_slow_path
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for _ZN5k_abc8columns1ILb0EEEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers
"""
    expected = {"_ZN5k_abc5rows0ILb1EEEvPf": (40, 20), "_ZN5k_abc8columns1ILb0EEEvPf": (16, 0)}
    assert gpu_code.resources(message) == expected
    assert [gpu_code._parts(name) for name in expected] == [("abc", "rows0"), ("abc", "columns1")]


def test_accesses_have_their_widths() -> None:
    body = [
        "LDG.E.128.CONSTANT R4, [R2]",
        "LDG.E.U16 R4, [R2]",
        "LDG.E R4, [R2]",
        "STG.E.64 [R2], R4",
        "FADD R1, R2, R3",
    ]
    assert gpu_code._accesses(body) == {"LDG.128": 1, "LDG.16": 1, "LDG.32": 1, "STG.64": 1}


@pytest.mark.compiled
@pytest.mark.skipif(TOOLS is None, reason="no nvcc or no nvdisasm")
def test_a_network(tmp_path, capsys) -> None:
    results = tmp_path / "code.json"
    options = ["dlrm", "--small", "--precision", "float32", "--architecture", "sm_90", "--json", str(results)]
    assert gpu_code.main(options) == 0
    found = json.loads(results.read_text())
    (row,) = found["rows"]
    assert row["kernels"] >= 3 and 16 <= row["registers"] <= 255 and not row["spilling"]
    assert str(row["registers"]) in capsys.readouterr().out
    page = "\n".join(gpu_code.page(found))
    assert f"| dlrm | {row['kernels']} |" in page and "registers, sm_90" in page and "nvcc" in page
    launched = gpu_code.launches(TWELVE["dlrm"], small=True)
    assert all(each.operation.bytes > 0 for each in launched)
