"""CUDA kernels as nvcc compiled them, in an interpreter: right, within bounds, aligned, and without races."""

from __future__ import annotations

import re

import pytest
import torch

from daceml_train.codegen.cuda.compile import find_nvcc
from daceml_train.errors import CompilerError
from tests.codegen import groups
from tests.codegen.cuda.ptx.running import check, found
from tests.codegen.cuda.running import code_of
from tests.codegen.running import Case
from tests.codegen.test_families import case, families
from tests.codegen.test_random_groups import group

try:
    find_nvcc()
except CompilerError as error:
    pytest.skip(error.message, allow_module_level=True)
pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("shape", "shift"),
    [
        pytest.param((23, 52), 0, marks=pytest.mark.slow),
        *(pytest.param(shape, shift, marks=pytest.mark.wide) for shape, shift in [((23, 52), 1), ((5, 130), 0)]),
    ],
)
def test_families(shape: tuple[int, int], shift: int) -> None:
    check(families(*shape, 1), shift)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_families_of_narrow_types(dtype: torch.dtype) -> None:
    r = torch.randn
    x, g, w, one = (t.to(dtype) for t in (r(23, 64), r(23, 64), r(64), r(23, 1)))
    narrow = {"tolerance": 2e-2}
    check(
        [
            case("layer_norm", groups.layer_norm, x, w, w, **narrow),
            case("layer_norm_backward", groups.layer_norm_backward, g, x, w, one, one, **narrow),
            case("softmax", groups.softmax, x, **narrow),
            case("softmax_backward", groups.softmax_backward, g, x, **narrow),
            case("bias_gelu_backward", groups.bias_gelu_backward, g, x, w, **narrow),
        ]
    )


@pytest.mark.wide
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_groups(first: int) -> None:
    """Without states of one element: one thread stores it, and what the others read of it is not used."""
    found = [c for c in map(group, range(first, first + 20)) if c is not None]
    check([c for c in found if all(c.inputs[argument].numel() > 1 for _, argument in c.kernel.updates)])


def without_barriers(header: str) -> str:
    return re.sub(r"__syncthreads\(\);", "", header)


def without_team_barriers(header: str) -> str:
    return header.replace("team_barrier(threadIdx.x / G, G);", "")


def without_bounds(header: str) -> str:
    return header.replace("!RAGGED || i < count", "true").replace("!RAGGED || count >= V", "true")


def without_alignment(header: str) -> str:
    return re.sub(r"return \(uintptr_t\)pointer % .*? == 0;", "return true;", header)


def wide_softmax() -> Case:
    """A row is a block's."""
    return case("softmax", groups.softmax, torch.randn(3, 2048))


def sums() -> Case:
    """Sums over rows, which the teams of a block share."""
    return case("column sum", groups.column_sum, torch.randn(4, 60, 64))


def held_sums() -> Case:
    """Rows of teams of two warps, several in a block, which sums the rows as well."""
    r = torch.randn
    x, one = r(300, 512), r(300, 1)
    made = case("layer_norm_backward", groups.layer_norm_backward, r(300, 512), x, r(512), one, one)
    geometry = code_of(made).plan.geometry
    assert geometry.team > 32 and geometry.teams > 1
    return made


def ragged() -> Case:
    """Rows that end within a fragment."""
    return case("gelu", groups.bias_gelu, torch.randn(1, 39), torch.randn(39))


@pytest.mark.parametrize(
    ("make", "change", "shift", "finding"),
    [
        (wide_softmax, without_barriers, 0, "shared race"),
        (sums, without_barriers, 0, "shared race"),
        (held_sums, without_team_barriers, 0, "shared race"),
        (ragged, without_bounds, 0, "out of bounds"),
        (sums, without_alignment, 1, "misaligned"),
    ],
)
def test_what_is_taken_away_is_found(make, change, shift: int, finding: str) -> None:
    torch.manual_seed(0)
    assert found(make(), None, shift) == []
    findings = found(make(), change, shift)
    assert any(finding in text for text in findings), findings
