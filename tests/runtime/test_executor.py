"""The native executor: launches and their results."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from daceml_train.errors import Invalid
from daceml_train.runtime.executor import Arena
from daceml_train.runtime.native_library import pool_statistics
from tests.runtime.executing import F32, Builder, call_once

pytestmark = pytest.mark.compiled


def offered(arena: Arena, like: torch.Tensor, call: Callable[[Builder, int], None], inputs: Sequence[torch.Tensor]):
    """What a call made in memory that the arena offers, and whether it lies there."""
    builder = Builder(arena=arena)
    for tensor in inputs:
        builder.input(tensor)
    slot, _ = builder.result(like)
    builder.plan.offer(slot, 4096)
    out, _ = builder.fresh(list(like.shape))
    call(builder, slot)
    seen, _ = builder.fresh([2])
    builder.plan.copy((out, 0), (slot, 0), like.nbytes)
    first, _ = builder.arena(4096, list(like.shape))
    builder.plan.copy((seen, 0), (first, 0), 8)
    builder.plan.finalize(4096 + like.nbytes, [out, seen])
    result, beginning = builder.plan.run(list(inputs))
    return result, torch.equal(beginning, result.flatten()[:2])


def test_a_result_takes_the_memory_that_the_arena_offers() -> None:
    x = torch.randn(64, 64)
    before = pool_statistics().in_use

    def call(builder: Builder, slot: int) -> None:
        view = builder.plan.view(0, 0, F32, [64, 64], [64, 1])
        builder.plan.call("aten::cumsum", "", [view, 0], [slot], tag=1)

    result, there = offered(Arena(), x, call, [x])
    assert there
    torch.testing.assert_close(result, x.cumsum(0))
    assert pool_statistics().in_use - before <= 2 * x.nbytes


def test_a_temporary_array_gives_the_offer_back() -> None:
    """Of a transposed argument the library makes a dense copy of the result's size first."""
    x = torch.randn(64, 64)

    def call(builder: Builder, slot: int) -> None:
        view = builder.plan.view(0, 0, F32, [64, 64], [1, 64])
        builder.plan.call("aten::logcumsumexp", "", [view, 0], [slot], tag=1)

    result, _ = offered(Arena(), x, call, [x])
    torch.testing.assert_close(result, x.t().logcumsumexp(0))


def test_a_result_does_not_stay_in_memory_offered_for_another() -> None:
    """Both results are of one size, and the first is handed out: the offer was for the second."""
    x, y = torch.randn(2048, 4), torch.randn(2048, 4)
    builder = Builder()
    _, view = builder.input(x)
    first, _ = builder.result(torch.empty(2048))
    second, _ = builder.result(torch.empty(2048))
    copied, _ = builder.fresh([2048])
    builder.plan.offer(second, 4096)
    builder.plan.call("aten::var_mean", "correction", [view, [1], None, False], [first, second], tag=1)
    builder.plan.copy((copied, 0), (second, 0), 4 * 2048)
    builder.plan.finalize(4096 + 4 * 2048, [first, copied])
    variance, mean = builder.plan.run([x])
    builder.plan.run([y])
    torch.testing.assert_close(variance, x.var(1))
    torch.testing.assert_close(mean, x.mean(1))


def test_only_results_of_calls_are_offered_memory_and_within_the_arena() -> None:
    builder = Builder()
    fresh, _ = builder.fresh([8])
    with pytest.raises(Invalid, match="no result of a call"):
        builder.plan.offer(fresh, 0)
    slot, _ = builder.result(torch.zeros(8))
    builder.plan.offer(slot, 64)
    with pytest.raises(Invalid, match="leaves the arena"):
        builder.plan.finalize(64, [])


# Kernels, copies and products


def test_kernels_run_in_order_over_arena_input_and_fresh_slots(kernels) -> None:
    a, b = torch.randn(100), torch.randn(100)
    builder = Builder()
    (x, _), (y, _), (t, _), (out, _) = (
        builder.input(a),
        builder.input(b),
        builder.arena(64, [100]),
        builder.fresh([100]),
    )
    builder.plan.kernel(kernels("add"), [(t, 0), (x, 0), (y, 0)], [100])
    builder.plan.kernel(kernels("scale"), [(t, 200)], [50, 3])
    builder.plan.copy((out, 0), (t, 200), 200)
    builder.plan.copy((out, 200), (t, 0), 200)
    builder.plan.finalize(64 + 400, [out])
    (result,) = builder.plan.run([a, b])
    torch.testing.assert_close(result, torch.cat([3 * (a + b)[50:], (a + b)[:50]]))


def test_products_take_transposed_views() -> None:
    a, b, bias = torch.randn(5, 4), torch.randn(6, 5), torch.randn(6)
    c, d = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    builder = Builder()
    (sa, _), (sb, _) = builder.input(a), builder.input(b)
    at, bt = builder.plan.view(sa, 0, F32, [4, 5], [1, 4]), builder.plan.view(sb, 0, F32, [5, 6], [1, 5])
    (_, vbias), (_, vc), (_, vd) = builder.input(bias), builder.input(c), builder.input(d)
    mm, addmm, bmm, baddbmm = (
        builder.fresh([4, 6]),
        builder.fresh([4, 6]),
        builder.fresh([3, 4, 6]),
        builder.fresh([3, 4, 6]),
    )
    builder.plan.mm(mm[1], at, bt)
    builder.plan.addmm(addmm[1], vbias, at, bt, beta=0.5, alpha=2.0)
    builder.plan.bmm(bmm[1], vc, vd)
    builder.plan.baddbmm(baddbmm[1], bmm[1], vc, vd, beta=-1.0, alpha=3.0)
    builder.plan.finalize(0, [mm[0], addmm[0], bmm[0], baddbmm[0]])
    outputs = builder.plan.run([a, b, bias, c, d])
    # The column-major views of `a` and `b` read them as these matrices.
    left, right = a.as_strided([4, 5], [1, 4]), b.as_strided([5, 6], [1, 5])
    torch.testing.assert_close(outputs[0], left @ right)
    torch.testing.assert_close(outputs[1], torch.addmm(bias, left, right, beta=0.5, alpha=2.0))
    torch.testing.assert_close(outputs[2], c @ d)
    torch.testing.assert_close(outputs[3], 2 * (c @ d))


# Boxed calls


def test_calls_with_one_result() -> None:
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    call_once("aten::relu", "", [x], [torch.relu(x)])
    call_once("aten::add", "Tensor", [x, y, 3], [torch.add(x, y, alpha=3)])
    call_once("aten::add", "Scalar", [x, 2.5, 2], [x + 5])
    call_once("aten::mul", "Tensor", [x, 2.5], [x * 2.5])  # a number where the schema wants a tensor
    call_once("aten::leaky_relu", "", [x, 1], [x])
    call_once("aten::sum", "dim_IntList", [x, [1], True, torch.float64], [x.sum(1, keepdim=True, dtype=torch.float64)])
    call_once("aten::cat", "", [[x, y], 1], [torch.cat([x, y], 1)])
    call_once("aten::index", "Tensor", [x, [None, torch.tensor([3, 1])]], [x[:, [3, 1]]])
    call_once(
        "aten::full",
        "",
        [[2, 3], 7, torch.int32, torch.strided, torch.device("cpu"), False],
        [torch.full([2, 3], 7, dtype=torch.int32)],
    )


def test_convolution_without_and_with_bias() -> None:
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    call_once("aten::convolution", "", [x, weight, None, *rest], [torch.conv2d(x, weight, padding=1)])
    channels_last = x.to(memory_format=torch.channels_last)
    call_once(
        "aten::convolution",
        "",
        [channels_last, weight, bias, *rest],
        [torch.conv2d(channels_last, weight, bias, padding=1)],
    )


def test_calls_with_several_results_and_with_a_list() -> None:
    x = torch.randn(4, 6)
    weight, bias = torch.randn(6), torch.randn(6)
    normal = torch.native_layer_norm(x, [6], weight, bias, 1e-5)
    call_once("aten::native_layer_norm", "", [x, [6], weight, bias, 1e-5], list(normal))
    wide = torch.native_layer_norm(x, [6], weight, bias, 1.0)
    call_once("aten::native_layer_norm", "", [x, [6], weight, bias, 1], list(wide))  # an integer where it wants a float
    call_once("aten::native_layer_norm", "", [x, [6], weight, bias, 1e-5], [None, normal[1], None])
    call_once("aten::split", "Tensor", [x, 2, 1], [part.contiguous() for part in x.split(2, 1)])


def test_a_result_takes_the_declared_strides() -> None:
    x = torch.randn(3, 4)
    builder = Builder()
    _, view = builder.input(x)
    slot, _ = builder.result(torch.empty(4, 3).t())
    builder.plan.call("aten::relu", "", [view], [slot])
    builder.plan.finalize(0, [slot])
    (output,) = builder.plan.run([x])
    assert output.stride() == (1, 3)
    torch.testing.assert_close(output, torch.relu(x))


def test_a_result_through_a_view_is_copied_into_arena_and_inputs() -> None:
    x, y = torch.randn(8), torch.zeros(8)
    builder = Builder()
    (_, vx), (_, vy) = builder.input(x), builder.input(y, mutable=True)
    _, arena = builder.arena(0, [8])
    builder.plan.call("aten::relu", "", [vx], [arena])
    builder.plan.call("aten::neg", "", [arena], [vy])
    builder.plan.finalize(32, [])
    assert builder.plan.run([x, y]) == []
    torch.testing.assert_close(y, -torch.relu(x))


@pytest.mark.parametrize("name", ["aten::view", "aten::expand"])
def test_a_result_that_aliases_an_argument_is_copied(name: str) -> None:
    x = torch.randn(2, 3)
    builder = Builder()
    _, vx = builder.input(x)
    (slot, _), (other, _) = builder.result(x), builder.result(x)
    for result in (slot, other):
        builder.plan.call(name, "", [vx, [2, 3]], [result])
    builder.plan.finalize(0, [slot, other])
    first, second = builder.plan.run([x])
    assert len({x.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3
    torch.testing.assert_close(first, x)


def test_results_of_one_call_do_not_alias_each_other() -> None:
    library = torch.library.Library("daceml_twins", "DEF")
    library.define("twins(Tensor x) -> Tensor[]")
    library.impl("twins", lambda x: list((x + 1).split(1)), "CPU")
    x = torch.randn(2, 3)
    call_once("daceml_twins::twins", "", [x], [(x + 1)[:1], (x + 1)[1:]])
    builder = Builder()
    _, vx = builder.input(x)
    slots = [builder.result(x[:1])[0], builder.result(x[:1])[0]]
    builder.plan.call("daceml_twins::twins", "", [vx], slots)
    builder.plan.finalize(0, slots)
    first, second = builder.plan.run([x])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_an_operator_written_in_python() -> None:
    @torch.library.custom_op("daceml_executor::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return x / 2

    x = torch.randn(4, 5)
    call_once("daceml_executor::halve", "", [x], [x / 2])


def test_what_an_operator_keeps_does_not_change() -> None:
    """It has memory of its own once the plan's memory, or that of other arguments, is shown to the next call."""
    kept: list[torch.Tensor] = []

    @torch.library.custom_op("daceml_executor::keep", mutates_args=())
    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x + 0

    first, second = torch.zeros(4), torch.ones(4)
    call_once("daceml_executor::keep", "", [first], [first])
    kept.clear()
    builder = Builder()
    _, vx = builder.input(first)
    slot, _ = builder.result(first)
    builder.plan.call("daceml_executor::keep", "", [vx], [slot])
    builder.plan.finalize(0, [slot])
    builder.plan.run([first])
    builder.plan.run([second])
    assert [tensor.tolist() for tensor in kept] == [first.tolist(), second.tolist()]


def test_the_callers_modes_do_not_leak_in() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    builder = Builder()
    _, vx = builder.input(x)
    (slot, _), (product, _) = builder.result(x.detach()), builder.result(torch.empty(5, 5))
    transposed = builder.plan.view(0, 0, F32, [5, 4], [1, 5])
    builder.plan.call("aten::relu", "", [vx], [slot])
    builder.plan.call("aten::mm", "", [transposed, vx], [product])
    builder.plan.finalize(0, [slot, product])
    with torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False):
        first, second = builder.plan.run([x])
    assert first.dtype == second.dtype == F32 and not first.requires_grad
    with torch.inference_mode():
        builder.plan.run([x])
    assert torch.is_grad_enabled()


# Errors while building
