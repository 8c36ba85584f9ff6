"""The shapes of blocks: each choice that sizes lead to is right, in any order of threads, at any alignment."""

import pytest
import torch

from daceml_train.codegen.cuda import geometry
from daceml_train.codegen.cuda.launch import generate, variants
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.tensor import symbol
from tests.codegen import groups
from tests.codegen.cuda.running import check, code_of, emulated, run
from tests.codegen.running import Case, describe, kernel_of, layout
from tests.codegen.test_families import case

pytestmark = pytest.mark.compiled


def rows(lanes: int, count: int = 3, dtype: torch.dtype = torch.float32) -> list[Case]:
    """The families whose geometry depends on the number of lanes."""
    r = torch.randn
    x, g, weight, bias = r(count, lanes), r(count, lanes), r(lanes), r(lanes)
    mean, rstd = x.mean(1, True), (x.var(1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    results = [
        (groups.layer_norm, x, weight, bias),
        (groups.layer_norm_backward, g, x, weight, mean, rstd),
        (groups.softmax, x),
        (groups.softmax_backward, g, x.softmax(1)),
        (groups.bias_gelu_backward, g, x, bias),
        (groups.column_sum, x),
    ]
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-12}.get(dtype, 5e-6)
    return [
        case(f"{body.__name__} {lanes} {dtype}", body, *(i.to(dtype) for i in inputs), tolerance=tolerance)
        for body, *inputs in results
    ]


def test_lanes_of_every_size(monkeypatch):
    few = rows(250)
    check(few)
    assert max(code_of(c).plan.geometry.team for c in few) == 128  # each thread has one fragment of two lanes
    monkeypatch.setattr(geometry, "FEW_THREADS", 0)
    cases = [c for lanes in (36, 250, 1024) for c in rows(lanes)]
    cases += rows(1024 * 4, 2) + rows(1024 * 9 + 4, 2)  # blocks of many warps; more than registers hold
    cases += rows(768, 300)[1:2]  # blocks of several teams of many warps
    check(cases)
    shapes = {code_of(c).plan.geometry for c in cases}
    assert {g.team for g in shapes} >= {16, 32, 64, 128}
    assert {g.threads for g in shapes} >= {128, 256, 512}
    assert any(g.tiled for g in shapes) and any(not g.resident for g in shapes)
    assert any(g.team > 32 and g.teams > 1 for g in shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, pytest.param(torch.float16, marks=pytest.mark.wide)])
def test_element_types(dtype):
    cases = [c for lanes in (512,) for c in rows(lanes, 3, dtype)]
    x = torch.randn(40, 24).to(dtype)
    cases.append(case("gelu", groups.bias_gelu, x, x[0], tolerance=1e-2))
    check(cases)
    widths = {code_of(c).plan.geometry.width for c in cases}
    assert max(widths) == 16 // dtype.itemsize


def test_whatever_a_search_may_try_is_right():
    """Every candidate of kernels of each kind: elementwise, turned, over rows short and long, sums over rows."""
    wide, long = rows(1024), rows(1024 * 4, 2)
    x, w = torch.randn(40, 24).bfloat16(), torch.randn(24).bfloat16()
    cases = [rows(36)[0], wide[1], wide[-1], long[2], rows(1024 * 9 + 4, 2)[1]]
    cases += [
        case("gelu", groups.bias_gelu, x, w, tolerance=1e-2),
        case("sum", groups.column_sum, torch.randn(300, 40)),
    ]
    cases.append(case("turned", groups.bias_gelu, torch.randn(70, 40).T, torch.randn(70)))
    pairs = [(c, code) for c in cases for code in variants(code_of(c))]
    assert all(sum(c is other for other, _ in pairs) > 1 for c in cases)
    library = emulated([code for _, code in pairs])
    for c, code in pairs:
        for out in c.outputs:
            out.fill_(77)
        run(c, code, library)
        assert c.worst() <= c.tolerance, (c.name, code.plan.geometry)


def test_many_rows_are_summed_in_parts():
    x = torch.randn(3000, 8)
    check([case("columns", groups.column_sum, x), case("one block", groups.column_sum, x)], blocks=1)
    check([case("columns", groups.column_sum, x)], blocks=5)


def test_unaligned_pointers_are_read_element_by_element():
    x, g = torch.randn(4 * 64 + 1)[1:].view(4, 64), torch.randn(4, 64)
    assert x.data_ptr() % 16
    check([case("softmax", groups.softmax, x), case("gelu", groups.bias_gelu, g, torch.randn(65)[1:])])


def test_sizes_may_be_symbols():
    """One kernel for all sizes of a batch, and one for all lengths of a row."""
    for rows_, lanes in ((symbol("n"), 64), (symbol("n"), symbol("m"))):
        x, g, w = torch.randn(6, 64), torch.randn(6, 64), torch.randn(64)
        mean, rstd = torch.randn(6, 1), torch.rand(6, 1)
        cases = [case("softmax", groups.softmax, x), case("dx", groups.layer_norm_backward, g, x, w, mean, rstd)]
        cases += [case("gelu", groups.bias_gelu, x, w), case("sum", groups.column_sum, x)]
        known = {6: rows_, 64: lanes}

        def symbolic(x: torch.Tensor, known=known, lanes=lanes) -> Layout:
            shape = tuple(known.get(s, s) for s in x.shape)
            strides = tuple(lanes if s == 64 else s for s in x.stride())
            return Layout(shape, strides, layout(x).dtype)

        kernels = []
        for c in cases:
            tensors = [describe(x) for x in c.inputs]
            types = [type(t)(symbolic(x).shape, t.dtype) for t, x in zip(tensors, c.inputs, strict=True)]
            body = {"softmax": groups.softmax, "dx": groups.layer_norm_backward, "gelu": groups.bias_gelu}
            c.kernel = kernel_of(body.get(c.name, groups.column_sum), *types)
            kernels.append(generate(c.kernel, [*map(symbolic, c.inputs)], [*map(symbolic, c.outputs)]))
        library = emulated(kernels)
        for c, code in zip(cases, kernels, strict=True):
            run(c, code, library, symbols={"n": 6, "m": 64})
            assert c.worst() <= c.tolerance, c.name


def test_any_order_of_threads_gives_the_same_bits():
    cases = rows(250)[:2] + rows(1024, 40)[1:2]
    codes = [code_of(c) for c in cases]
    library = emulated(codes)
    first: list[list[torch.Tensor]] = []
    for seed in (1, 77, 123456789):
        library.emulator_seed(seed)
        for c, code in zip(cases, codes, strict=True):
            run(c, code, library, blocks=3)
        results = [[x.clone() for x in c.outputs] for c in cases]
        first = first or results
        for c, a, b in zip(cases, first, results, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), c.name


def test_the_emulator_finds_a_race():
    """What it would be worth if it found none: a kernel without its barriers depends on the order of threads."""
    (c,) = [c for c in rows(1024 * 4, 2) if c.name.startswith("softmax 4")]
    code = code_of(c)
    library = emulated([code], barriers=False)
    errors = []
    for seed in range(1, 6):
        library.emulator_seed(seed)
        run(c, code, library)
        errors.append(c.worst())
    assert max(errors) > c.tolerance


def test_dropout_draws_what_the_cpu_draws():
    from daceml_train.codegen.cpu.compile import compile_kernels, load
    from tests.codegen.running import FOLDER

    x, seed = torch.randn(40, 52), torch.tensor(12345678901234)
    there, here = (case("dropout", groups.dropout, x, seed) for _ in range(2))
    code = code_of(there)
    run(there, code, emulated([code]))
    here.call(load(compile_kernels([here.code], FOLDER)[here.code.key], here.code.key))
    assert torch.equal(there.outputs[0], here.outputs[0])


@pytest.mark.parametrize(
    ("body", "inputs", "limit"),
    [
        (groups.column_sum, [(400, 960)], ""),
        (groups.column_sum, [(25600, 24)], ""),
        (groups.column_sum, [(400, 160)], "elements"),
        (groups.bias_gelu, [(400, 1024), (1024,)], ""),
        (groups.bias_gelu, [(100, 1024), (1024,)], "elements"),
        (groups.softmax, [(512, 200)], "rows"),
        (groups.softmax, [(20000, 200)], ""),
    ],
)
def test_blocks_fill_a_device_or_meet_a_limit(body, inputs, limit):
    """132 multiprocessors with 512 threads each: threads have less work in sequence where there is little of it."""
    operands = [torch.empty(shape) for shape in inputs]
    code = code_of(case("filled", body, *operands))
    value = lambda size: int(size)  # noqa: E731
    threads = code.blocks(value, 132) * code.threads
    assert code.limit(value, 132) == limit
    assert (threads >= 132 * 512) == (limit == "")
    assert code.blocks(value, 1) <= code.blocks(value, 132)  # a small device keeps the work per thread
