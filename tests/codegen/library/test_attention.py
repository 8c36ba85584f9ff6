"""Attention by kernels of our own, and their gradients, against what the operators mean, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from daceml_train.codegen.cpu.compile import compile_kernels
from daceml_train.codegen.library.templates import written_kernel
from daceml_train.ops.fused_attention import FusedAttention, FusedAttentionGrad
from tests.codegen.running import launch, layout

SIZES = [  # batch, heads, queries, keys, size of a head: whole vectors, parts of them, bands with a remainder
    (2, 3, 64, 64, 32),
    (1, 2, 37, 45, 19),
    (2, 1, 3, 1, 5),
    (1, 1, 33, 130, 64),
]
VARIANTS = [  # the type, what is put in place of masked scores (None adds), probability of dropout, keys' layout
    (torch.float32, (), 0.0, False),
    (torch.float32, (None, -float("inf")), 0.3, True),
    (torch.float64, (-5.0,), 0.0, False),
]


def tensors(sizes: tuple[int, ...], dtype: torch.dtype, fills: tuple, p: float, strided: bool) -> list[torch.Tensor]:
    """Queries, keys, values, the seed, masks, and a cotangent."""
    b, h, t, s, e = sizes
    q, k, v, g = (torch.randn(b, n, h, e, dtype=dtype).transpose(1, 2) for n in (t, s, s, t))
    if strided:
        k, v = (x.mT.contiguous().mT for x in (k, v))
    masks = [torch.randn(1, h, t, s, dtype=dtype) if f is None else torch.rand(b, 1, t, s) < 0.3 for f in fills]
    for mask in masks:
        if mask.dtype is torch.bool:
            mask[..., 0] = False  # every query sees a key
    return [q, k, v, *[torch.tensor(42)] * (p > 0), *masks, g]


@pytest.mark.compiled
def test_equals_the_operators(compiler: str, tmp_path: Path) -> None:
    """The bits do not depend on the number of blocks."""
    torch.manual_seed(0)
    cases = []
    for sizes in SIZES:
        for dtype, fills, p, strided in VARIANTS:
            *operands, g = tensors(sizes, dtype, fills, p, strided)
            options = {"scale": 0.3, "fills": fills, "p": p, "stream": 1}
            op, back = FusedAttention(**options), FusedAttentionGrad(**options)
            wide = [x.double().numpy() if x.is_floating_point() else x.numpy() for x in operands]
            want = op.evaluate(*wide)
            want_back = back.evaluate(g.double().numpy(), *wide[:3], *want, *wide[3:])
            y, level = (torch.from_numpy(x).to(dtype) for x in want)
            for each, arrays, expected in (
                (op, operands, want),
                (back, [g, *operands[:3], y, level, *operands[3:]], want_back),
            ):
                results = [torch.full(x.shape, float("nan"), dtype=dtype) for x in expected]
                code = written_kernel(each, [*map(layout, arrays)], [*map(layout, results)])
                assert code is not None
                cases.append((code, arrays, results, expected))
    paths = compile_kernels([code for code, *_ in cases], tmp_path, compiler=compiler)
    for code, arrays, results, expected in cases:
        bits = []
        for blocks in (1, 3):
            launch(code, paths[code.key], [*arrays, *results], blocks)
            for result, want in zip(results, expected, strict=True):
                tolerance = 2e-5 if result.dtype is torch.float32 else 1e-12
                np.testing.assert_allclose(result.numpy(), want, rtol=tolerance, atol=tolerance)
            bits.append([x.clone() for x in results])
        assert all(torch.equal(one, other) for one, other in zip(*bits, strict=True))
