"""Each family of kernels against its NumPy meaning in float64."""

import pytest
import torch

from daceml_train.codegen.cpu.sdfg import SCALARS
from tests.codegen import groups
from tests.codegen.running import Case, check, describe, kernel_of

pytestmark = pytest.mark.compiled


def case(name, body, *inputs, **options) -> Case:
    return Case(name, kernel_of(body, *map(describe, inputs)), list(inputs), **options)


def families(rows: int, lanes: int, blocks: int) -> list[Case]:
    r = torch.randn
    x, g, weight, bias = r(rows, lanes), r(rows, lanes), r(lanes), r(lanes)
    mean, rstd = x.mean(1, True), (x.var(1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    masked = x.masked_fill(torch.rand(rows, lanes) < 0.3, -torch.inf)
    masked[:, 0] = 0.5
    y = x.softmax(1)
    target = torch.randint(0, lanes, (rows,))
    image = r(3, 5, 6, 7)
    nhwc = image.contiguous(memory_format=torch.channels_last)
    c = [r(5) for _ in range(3)]
    statistics = [image.mean((0, 2, 3)), (image.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()]
    flat = nhwc.permute(0, 2, 3, 1)
    out = [torch.empty_like(nhwc)] + [torch.empty(5) for _ in range(3)]
    out2 = [torch.empty_like(nhwc)] + [torch.empty(5) for _ in range(2)]
    b = {"blocks": blocks}
    return [
        case("layer_norm", groups.layer_norm, x, weight, bias, **b),
        case("layer_norm_backward", groups.layer_norm_backward, g, x, weight, mean, rstd, **b),
        case("softmax", groups.softmax, masked, **b),
        case("softmax_backward", groups.softmax_backward, g, y, **b),
        case("log_softmax", groups.log_softmax, x, **b),
        case("bias_gelu", groups.bias_gelu, x, bias, **b),
        case("bias_gelu_backward", groups.bias_gelu_backward, g, x, bias, **b),
        case("bias_gelu_erf_backward", groups.bias_gelu_erf_backward, g, x, bias, **b),
        case("cross_entropy", groups.cross_entropy, x, target, **b),
        case("glu", groups.glu, x[:, : lanes // 2 * 2].contiguous(), **b),
        case("dropout", groups.dropout, x, torch.tensor(12345678901234), **b),
        case("adam", groups.adam, x, g, weight * 0 + 0.1 * r(rows, lanes), g * g, torch.tensor(3.0), **b),
        case("column_sum", groups.column_sum, r(4, rows, lanes), **b),
        case("full_mean", groups.full_mean, x, **b),
        case("side by side", groups.side_by_side, x, g, y, **b),
        case("outer", groups.outer, weight, bias, **b),
        case("side by side, one transposed", groups.side_by_side, x, r(lanes, rows).T, y, **b),
        case("batch_norm", groups.batch_norm(1), image, *c, **b),
        case("batch_norm channels last", groups.batch_norm(1), nhwc, *c, outputs=out, **b),
        case("batch_norm last dimension", groups.batch_norm(3), flat, *c, **b),
        case("batch_norm_backward", groups.batch_norm_backward(1), image, image + 0.1, image, c[0], *statistics, **b),
        case(
            "batch_norm_backward channels last",
            groups.batch_norm_backward(1),
            nhwc,
            nhwc + 0.1,
            nhwc,
            c[0],
            *statistics,
            outputs=out2,
            **b,
        ),
        case("softmax over channels", groups.softmax_over(1), image, **b),
        case("softmax over rows", groups.softmax_over(0), r(20, 600), **b),
    ]


def test_many_scalars() -> None:
    """They are computed in several tasklets: sums of all rows, values of these and of one another, and copies."""
    x, steps = torch.randn(7, 5), [torch.tensor(float(i)) for i in range(2 * SCALARS)]

    def body(x, *steps):
        total = x.reduce("sum", (0, 1))
        values = [total]
        for step in steps:
            values.append(values[-1] * 0.5 + step)
        return [*values, *(a + b for a, b in zip(values, values[::-1], strict=True)), steps[0]]

    check([Case("many scalars", kernel_of(body, *map(describe, (x, *steps))), [x, *steps], blocks=3)])


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("shape", [(23, 50), (5, 130)])
def test_families(shape, blocks):
    check(families(*shape, blocks))
