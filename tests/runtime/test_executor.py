"""The native executor: launches, inputs, results, memory, errors and threads."""

import ctypes
import gc
import random
import resource
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from daceml_train.errors import ExecutionError, Invalid
from daceml_train.runtime import executor
from daceml_train.runtime.executor import Arena, InputMismatch, Plan, PlanView, pool_statistics, pool_trim, pooled
from daceml_train.runtime.native_build import build

pytestmark = pytest.mark.compiled

F32 = torch.float32

KERNELS = """
#include <cstdint>
#include <stdexcept>
#define KERNEL extern "C" __attribute__((visibility("default"))) void
KERNEL add(void** p, const int64_t* n) {  // p[0] = p[1] + p[2]
  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[0])[i] = ((float*)p[1])[i] + ((float*)p[2])[i];
}
KERNEL scale(void** p, const int64_t* n) {  // p[0] *= n[1]
  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[0])[i] *= n[1];
}
KERNEL explode(void**, const int64_t*) { throw std::runtime_error("the kernel gave up"); }
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], int]:
    """The address of a kernel, by name."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(KERNELS)
    native = ctypes.CDLL(str(build(folder / "kernels.cpp", folder / "cache")))
    return lambda name: ctypes.cast(getattr(native, name), ctypes.c_void_p).value or 0


def contiguous(sizes: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return strides


class Builder:
    """A plan whose slots are numbered as they come."""

    def __init__(self, slots: int = 16, arena: Arena | None = None) -> None:
        self.plan, self.slots, self.inputs = Plan(slots, arena), 0, 0

    def next(self) -> int:
        self.slots += 1
        return self.slots - 1

    def input(self, like: torch.Tensor, mutable: bool = False) -> tuple[int, PlanView]:
        slot, layout = self.next(), (like.dtype, list(like.shape), list(like.stride()))
        self.plan.input_slot(slot, self.inputs, *layout, mutable=mutable)
        self.inputs += 1
        return slot, self.plan.view(slot, 0, *layout)

    def result(self, like: torch.Tensor) -> tuple[int, PlanView]:
        slot, layout = self.next(), (like.dtype, list(like.shape), list(like.stride()))
        self.plan.result_slot(slot, *layout)
        return slot, self.plan.view(slot, 0, *layout)

    def fresh(self, sizes: Sequence[int], dtype: torch.dtype = F32) -> tuple[int, PlanView]:
        slot = self.next()
        self.plan.fresh_slot(slot, dtype, sizes, contiguous(sizes))
        return slot, self.plan.view(slot, 0, dtype, sizes, contiguous(sizes))

    def arena(self, offset: int, sizes: Sequence[int]) -> tuple[int, PlanView]:
        slot = self.next()
        self.plan.arena_slot(slot, offset)
        return slot, self.plan.view(slot, 0, F32, sizes, contiguous(sizes))


def call_once(name: str, overload: str, arguments: Sequence, expected: Sequence[torch.Tensor | None]) -> None:
    """Runs one operator through a plan and compares all results; tensors among the arguments become inputs."""
    builder, tensors = Builder(), []

    def convert(argument):
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
            return builder.input(argument)[1]
        if isinstance(argument, list):
            return [convert(item) for item in argument]
        return argument

    converted = [convert(argument) for argument in arguments]
    slots = [None if tensor is None else builder.result(tensor)[0] for tensor in expected]
    builder.plan.call(name, overload, converted, slots, tag=1)
    builder.plan.finalize(0, [slot for slot in slots if slot is not None])
    for _ in range(2):
        outputs = builder.plan.run(tensors)
        for output, tensor in zip(outputs, (tensor for tensor in expected if tensor is not None), strict=True):
            torch.testing.assert_close(output, tensor, rtol=0, atol=0)
            assert output.stride() == tensor.stride()
            assert not output.requires_grad


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
    made, beginning = builder.plan.run(list(inputs))
    return made, torch.equal(beginning, made.flatten()[:2])


def test_a_result_takes_the_memory_that_the_arena_offers() -> None:
    x = torch.randn(64, 64)
    before = pool_statistics().in_use

    def call(builder: Builder, slot: int) -> None:
        view = builder.plan.view(0, 0, F32, [64, 64], [64, 1])
        builder.plan.call("aten::cumsum", "", [view, 0], [slot], tag=1)

    made, there = offered(Arena(), x, call, [x])
    assert there
    torch.testing.assert_close(made, x.cumsum(0))
    assert pool_statistics().in_use - before <= 2 * x.nbytes


def test_a_temporary_array_gives_the_offer_back() -> None:
    """Of a transposed argument the library makes a dense copy of the result's size first."""
    x = torch.randn(64, 64)

    def call(builder: Builder, slot: int) -> None:
        view = builder.plan.view(0, 0, F32, [64, 64], [1, 64])
        builder.plan.call("aten::logcumsumexp", "", [view, 0], [slot], tag=1)

    made, _ = offered(Arena(), x, call, [x])
    torch.testing.assert_close(made, x.t().logcumsumexp(0))


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


def test_a_view_kept_by_an_operator_does_not_move() -> None:
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
    assert [tensor.data_ptr() for tensor in kept] == [first.data_ptr(), second.data_ptr()]


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


def test_building_refuses_with_a_sentence(kernels) -> None:
    x = torch.randn(2, 3)

    def start() -> tuple[Builder, Plan, PlanView]:
        builder = Builder()
        _, view = builder.input(x)
        return builder, builder.plan, view

    _, plan, view = start()
    with pytest.raises(Invalid, match="Could not find schema for aten::no_such"):
        plan.call("aten::no_such", "", [view], [None])
    with pytest.raises(Invalid, match=r"argument 1 'other' of aten::add.Tensor wants Tensor, given str"):
        plan.call("aten::add", "Tensor", [view, "two"], [None])
    with pytest.raises(Invalid, match=r"argument 1 'dim' of aten::sum.dim_IntList is a list of int, given float"):
        plan.call("aten::sum", "dim_IntList", [view, [1.5]], [None])
    with pytest.raises(Invalid, match=r"argument 1 'other' of aten::add.Tensor is missing"):
        plan.call("aten::add", "Tensor", [view], [None])
    with pytest.raises(Invalid, match="aten::relu takes 1 arguments, given more"):
        plan.call("aten::relu", "", [view, 1], [None])
    with pytest.raises(Invalid, match=r"argument 0 'self' of aten::relu must not be None"):
        plan.call("aten::relu", "", [None], [None])
    with pytest.raises(Invalid, match="there is no slot 99"):
        plan.arena_slot(99, 0)
    with pytest.raises(Invalid, match="slot 0 is declared twice"):
        plan.arena_slot(0, 0)
    with pytest.raises(Invalid, match="leaves slot 0 of 24 bytes"):
        plan.view(0, 4, F32, [6], [1])
    with pytest.raises(Invalid, match="2 sizes but 1 strides"):
        plan.view(0, 0, F32, [2, 3], [1])
    with pytest.raises(Invalid, match="there is no view 7"):
        plan.mm(view, view, PlanView(7))
    with pytest.raises(Invalid, match="the kernel's address is null"):
        plan.kernel(0, [])


def test_finalize_follows_every_value(kernels) -> None:
    x = torch.randn(2, 3)

    def refused(sentence: str, build_list: Callable[[Builder, PlanView], list[int]], arena_bytes: int = 0) -> None:
        builder = Builder()
        _, view = builder.input(x)
        outputs = build_list(builder, view)
        with pytest.raises(Invalid, match=sentence):
            builder.plan.finalize(arena_bytes, outputs)

    def early(builder: Builder, view: PlanView) -> list[int]:
        _, result = builder.result(x)
        builder.plan.call("aten::relu", "", [result], [None], tag=5)
        return []

    def late(builder: Builder, view: PlanView) -> list[int]:
        slot, result = builder.result(x)
        builder.plan.call("aten::relu", "", [view], [slot])
        builder.plan.release(slot)
        builder.plan.call("aten::relu", "", [result], [None], tag=6)
        return []

    def twice(builder: Builder, view: PlanView) -> list[int]:
        slot, _ = builder.result(x)
        builder.plan.call("aten::relu", "", [view], [slot])
        builder.plan.call("aten::relu", "", [view], [slot])
        return []

    def released(builder: Builder, view: PlanView) -> list[int]:
        slot, _ = builder.result(x)
        builder.plan.call("aten::relu", "", [view], [slot])
        builder.plan.release(slot)
        return [slot]

    def into_arena(builder: Builder, view: PlanView) -> list[int]:
        slot, _ = builder.arena(0, [6])
        builder.plan.call("aten::relu", "", [view], [slot])
        return []

    refused(r"launch 0 \(tag 5\) uses slot 1 before a call produced it", early)
    refused(r"launch 2 \(tag 6\) uses slot 1 after its release", late)
    refused(r"launch 1 \(tag -1\) produces slot 1 a second time", twice)
    refused("output slot 1 is released before the end", released)
    refused("returns into slot 1, which is no result slot; give a view", into_arena)
    refused("output slot 1 is never written", lambda builder, _: [builder.fresh([3])[0]])
    refused("output slot 0 is not owned", lambda builder, _: [0])
    refused("ends at 40, behind the arena of 39 bytes", lambda builder, _: [builder.arena(16, [6])[0]][:0], 39)


# Inputs


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), r"given Double sizes \[2, 3\]"),
        (torch.zeros(3, 2), r"given Float sizes \[3, 2\]"),
        (torch.zeros(3, 2).t(), r"given Float sizes \[2, 3\] strides \[1, 2\]"),
        (torch.zeros(2, 3, device="meta"), "given a tensor on meta"),
        (torch.zeros(2, 3).to_sparse(), "given a tensor that is not plain strided memory"),
        (torch.zeros(2, 3, dtype=torch.complex64).conj().imag, "given a tensor that is not plain strided memory"),
    ],
)
def test_a_mismatch_names_the_input_and_runs_nothing(given: torch.Tensor, sentence: str) -> None:
    target = torch.zeros(2, 3)
    builder = Builder()
    (_, out), (_, view) = builder.input(target, mutable=True), builder.input(torch.ones(2, 3))
    builder.plan.call("aten::add", "Scalar", [view, 1], [out])
    builder.plan.finalize(0, [])
    version = target._version
    with pytest.raises(InputMismatch, match=sentence) as caught:
        builder.plan.run([target, given])
    assert caught.value.index == 1
    assert r"input 1: expected Float sizes [2, 3] strides [3, 1] on cpu" in str(caught.value)
    assert target._version == version and target.sum() == 0
    with pytest.raises(Invalid, match="takes 2 inputs, given 1"):
        builder.plan.run([target])


def test_a_storage_without_memory_is_refused() -> None:
    x = torch.zeros(2, 3)
    builder = Builder()
    builder.input(x)
    builder.plan.finalize(0, [])
    builder.plan.run([x])
    x.untyped_storage().resize_(0)
    with pytest.raises(InputMismatch, match="without memory behind it"):
        builder.plan.run([x])


def test_strides_of_single_and_empty_dimensions_do_not_matter() -> None:
    for tensor, other in [
        (torch.randn(1, 3), torch.randn(3, 1).t()),
        (torch.randn(0, 3), torch.randn(3, 0).t()),
    ]:
        builder = Builder()
        _, view = builder.input(tensor)
        slot, _ = builder.result(tensor)
        builder.plan.call("aten::relu", "", [view], [slot])
        builder.plan.finalize(0, [slot])
        torch.testing.assert_close(builder.plan.run([other])[0], torch.relu(other))


def test_data_may_be_rebound_between_runs(kernels) -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    builder = Builder()
    x, view = builder.input(parameter.detach())
    (out, _), (slot, _) = builder.fresh([10]), builder.result(parameter.detach())
    builder.plan.kernel(kernels("add"), [(out, 0), (x, 0), (x, 0)], [10])
    builder.plan.call("aten::neg", "", [view], [slot])
    builder.plan.finalize(0, [out, slot])
    for value in (1.0, 5.0, 7.0):
        parameter.data = torch.full([10], value)
        total, negative = builder.plan.run([parameter])
        assert total.tolist() == [2 * value] * 10 and negative.tolist() == [-value] * 10


def test_run_addresses_reads_the_callers_array(kernels) -> None:
    first, second = torch.ones(4), torch.full([4], 2.0)
    builder = Builder()
    (a, _), (b, _) = builder.input(first), builder.input(first)
    out, _ = builder.fresh([4])
    builder.plan.kernel(kernels("add"), [(out, 0), (a, 0), (b, 0)], [4])
    builder.plan.finalize(0, [out])
    addresses = (ctypes.c_void_p * 2)(first._cdata, first._cdata)
    assert builder.plan.run_addresses(addresses)[0].tolist() == [2.0] * 4
    addresses[1] = second._cdata
    assert builder.plan.run_addresses(addresses)[0].tolist() == [3.0] * 4
    addresses[0] = None
    with pytest.raises(InputMismatch, match=r"input 0: .* given no tensor"):
        builder.plan.run_addresses(addresses)


def test_a_mutable_input_moves_its_version(kernels) -> None:
    x, y = torch.ones(4), torch.ones(4)
    builder = Builder()
    (a, _), (b, _) = builder.input(x, mutable=True), builder.input(y)
    builder.plan.kernel(kernels("add"), [(a, 0), (a, 0), (b, 0)], [4])
    builder.plan.finalize(0, [])
    versions = x._version, y._version
    builder.plan.run([x, y])
    assert (x._version, y._version) == (versions[0] + 1, versions[1])
    assert x.tolist() == [2.0] * 4


# Failures while running


def test_an_operator_that_raises_names_its_launch_and_the_plan_survives() -> None:
    table, index = torch.randn(4, 3), torch.tensor([1, 2])
    builder = Builder()
    (_, vt), (_, vi) = builder.input(table), builder.input(index)
    (kept, _), (slot, _) = builder.result(table), builder.result(table[:2])
    builder.plan.call("aten::relu", "", [vt], [kept], tag=10)
    builder.plan.call("aten::index_select", "", [vt, 0, vi], [slot], tag=11)
    builder.plan.finalize(0, [kept, slot])
    in_use = pool_statistics().in_use
    with pytest.raises(ExecutionError, match="index out of range") as caught:
        builder.plan.run([table, torch.tensor([1, 9])])
    assert caught.value.tag == 11
    assert pool_statistics().in_use == in_use
    torch.testing.assert_close(builder.plan.run([table, index])[1], table[1:3])


def test_an_operator_in_python_that_raises() -> None:
    def boom(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such thing")

    torch.library.custom_op("daceml_executor::boom", boom, mutates_args=())
    library = torch.library.Library("daceml_boom", "DEF")
    library.define("boom(Tensor x) -> Tensor")
    library.impl("boom", boom, "CPU")
    x = torch.randn(3)
    for name in ("daceml_executor::boom", "daceml_boom::boom"):
        builder = Builder()
        _, view = builder.input(x)
        builder.plan.call(name, "", [view], [None], tag=4)
        builder.plan.finalize(0, [])
        with pytest.raises(ExecutionError, match=r"KeyError: 'no such thing'(.|\n)*test_executor.py") as caught:
            builder.plan.run([x])
        assert caught.value.tag == 4


def test_a_kernel_that_throws(kernels) -> None:
    builder = Builder()
    builder.plan.kernel(kernels("explode"), [], tag=3)
    builder.plan.finalize(0, [])
    with pytest.raises(ExecutionError, match="the kernel gave up") as caught:
        builder.plan.run([])
    assert caught.value.tag == 3


def test_a_result_of_other_sizes_is_an_error() -> None:
    x = torch.randn(2, 3)
    builder = Builder()
    _, view = builder.input(x)
    slot, _ = builder.result(torch.empty(3, 3))
    builder.plan.call("aten::relu", "", [view], [slot], tag=2)
    builder.plan.finalize(0, [slot])
    with pytest.raises(ExecutionError, match=r"result 0 of aten::relu: expected Float sizes \[3, 3\].* got .*\[2, 3\]"):
        builder.plan.run([x])


def test_memory_that_cannot_be_had_is_an_error() -> None:
    builder = Builder()
    slot, view = builder.fresh([1 << 46])
    builder.plan.call("aten::zero_", "", [view], [], tag=8)
    builder.plan.finalize(0, [slot])
    with pytest.raises(ExecutionError, match="memory") as caught:
        builder.plan.run([])
    assert caught.value.tag == 8
    arena = Builder()
    arena.arena(0, [4])
    arena.plan.finalize(1 << 60, [])
    with pytest.raises(ExecutionError, match="out of memory"):
        arena.plan.run([])


def test_a_plan_that_calls_itself_is_refused() -> None:
    builder = Builder()

    @torch.library.custom_op("daceml_executor::again", mutates_args=())
    def again(x: torch.Tensor) -> torch.Tensor:
        return builder.plan.run([x])[0]

    x = torch.randn(3)
    _, view = builder.input(x)
    slot, _ = builder.result(x)
    builder.plan.call("daceml_executor::again", "", [view], [slot])
    builder.plan.finalize(0, [slot])
    with pytest.raises(ExecutionError, match="already running on this thread"):
        builder.plan.run([x])


# Memory


def test_outputs_belong_to_the_caller_and_memory_returns(kernels) -> None:
    x = torch.randn(64, 64)
    builder = Builder()
    a, view = builder.input(x)
    (relu, vrelu), (tanh, _), (out, _) = builder.result(x), builder.result(x), builder.fresh([64, 64])
    builder.plan.call("aten::relu", "", [view], [relu])
    builder.plan.call("aten::tanh", "", [vrelu], [tanh])
    builder.plan.release(relu)
    builder.plan.kernel(kernels("add"), [(out, 0), (a, 0), (tanh, 0)], [64 * 64])
    builder.plan.finalize(0, [out, tanh])
    gc.collect()
    before = pool_statistics()
    first = builder.plan.run([x])
    assert pool_statistics().in_use == before.in_use + 2 * 64 * 64 * 4
    second = builder.plan.run([x])
    assert first[0].data_ptr() != second[0].data_ptr()
    torch.testing.assert_close(first[0], x + torch.tanh(torch.relu(x)))
    assert first[0]._use_count() == 1
    del first, second
    assert pool_statistics().in_use == before.in_use
    for _ in range(1000):
        builder.plan.run([x])
    after = pool_statistics()
    assert after.in_use == before.in_use
    assert after.free <= max(before.free, 8 * 64 * 64 * 4)


def test_release_returns_memory_during_the_run() -> None:
    seen: list[int] = []

    @torch.library.custom_op("daceml_executor::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(pool_statistics().in_use)
        return x.new_empty(0)

    x = torch.randn(64, 64)
    builder = Builder()
    _, view = builder.input(x)
    slot, _ = builder.result(x)
    builder.plan.call("aten::relu", "", [view], [slot])
    builder.plan.call("daceml_executor::look", "", [view], [None])
    builder.plan.release(slot)
    builder.plan.call("daceml_executor::look", "", [view], [None])
    builder.plan.finalize(0, [])
    builder.plan.run([x])
    assert seen[0] - seen[1] == 64 * 64 * 4


def test_the_same_output_may_be_asked_for_twice() -> None:
    x = torch.randn(8)
    builder = Builder()
    _, view = builder.input(x)
    slot, _ = builder.result(x)
    builder.plan.call("aten::relu", "", [view], [slot])
    builder.plan.finalize(0, [slot, slot])
    first, second = builder.plan.run([x])
    assert first.data_ptr() == second.data_ptr()
    torch.testing.assert_close(second, torch.relu(x))


def test_the_pool_serves_only_behind_its_gate() -> None:
    before = pool_statistics().in_use
    ordinary = torch.empty(1 << 20)
    assert pool_statistics().in_use == before
    with pooled():
        tiny = torch.empty(8)
        assert pool_statistics().in_use == before
        large = torch.empty(1 << 20)
        assert pool_statistics().in_use == before + (4 << 20)
    assert torch.empty(1 << 20).sum() is not None and pool_statistics().in_use == before + (4 << 20)
    thread = threading.Thread(target=large.untyped_storage().resize_, args=(8 << 20,))  # another thread, gate off
    thread.start()
    thread.join()
    assert pool_statistics().in_use == before
    del ordinary, tiny


def test_the_pool_merges_reuses_and_trims() -> None:
    with pooled():
        tensors = [torch.empty(1 << 18) for _ in range(16)]
        address = min(tensor.data_ptr() for tensor in tensors)
        del tensors
        pool_trim()
        assert pool_statistics().free == 0
        pieces = [torch.full([1 << 18], float(i)) for i in range(16)]
        assert all(bool((piece == i).all()) for i, piece in enumerate(pieces))  # blocks do not overlap
        del pieces
        free = pool_statistics().free
        assert free >= 16 << 20
        whole = torch.empty(16 << 18)  # as large as all pieces together: they were merged
        assert pool_statistics().free == free - (16 << 20)
        assert whole.data_ptr() <= address
        del whole
    assert pool_trim() == free
    assert pool_statistics().free == 0


def test_pool_blocks_stay_apart_under_threads() -> None:
    before, wrong = pool_statistics().in_use, []

    def work(seed: int) -> None:
        generator, held = random.Random(seed), []
        with pooled():
            for step in range(1500):
                if held and generator.random() < 0.5:
                    value, tensor = held.pop(generator.randrange(len(held)))
                    if not bool((tensor == value).all()):
                        wrong.append(seed)
                else:
                    value = seed * 10000 + step
                    held.append((value, torch.full([generator.randrange(1024, 40000)], value)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool_statistics().in_use == before


def test_pool_memory_works_with_lazy_copies_and_sharing() -> None:
    with pooled():
        x = torch.arange(4096.0)
    lazy = torch._lazy_clone(x)
    lazy += 1
    assert x[1] == 1 and lazy[1] == 2
    x.share_memory_()
    assert x[4095] == 4095


def test_a_forked_child_can_use_the_pool() -> None:
    context = torch.multiprocessing.get_context("fork")
    with pooled():
        x = torch.ones(1 << 16)

    def child() -> None:
        torch.set_num_threads(1)  # as data loader workers do: the OpenMP runtime does not survive a fork
        with pooled():
            assert (torch.ones(1 << 16) + x).sum().item() == 2 << 16

    process = context.Process(target=child)
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0


def test_plans_share_an_arena_that_grows_and_keeps_its_contents(kernels) -> None:
    arena, x = Arena(), torch.randn(1000)
    small, large = Builder(arena=arena), Builder(arena=arena)
    a, _ = small.input(x)
    t, _ = small.arena(0, [1000])
    small.plan.kernel(kernels("add"), [(t, 0), (a, 0), (a, 0)], [1000])
    small.plan.finalize(4000, [])
    seen, _ = large.arena(0, [1000])
    out, _ = large.fresh([1000])
    large.plan.copy((out, 0), (seen, 0), 4000)
    large.plan.finalize(64 << 20, [out])
    assert arena.capacity == 0
    small.plan.run([x])
    assert arena.capacity == 4096
    torch.testing.assert_close(large.plan.run([])[0], 2 * x)
    assert arena.capacity == 64 << 20
    small.plan.run([2 * x])
    torch.testing.assert_close(large.plan.run([])[0], 4 * x)
    assert arena.capacity == 64 << 20


def test_a_warm_plan_takes_no_page_faults() -> None:
    x, weights = torch.randn(8, 16, 64, 64), [torch.randn(16, 16, 3, 3) for _ in range(4)]
    builder = Builder()
    slot, view = builder.input(x)
    views = [builder.input(weight)[1] for weight in weights]
    for weight in views:
        result, next_view = builder.result(x)
        builder.plan.call(
            "aten::convolution", "", [view, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1], [result]
        )
        if slot:
            builder.plan.release(slot)
        slot, view = result, next_view
    builder.plan.finalize(0, [slot])
    for _ in range(5):
        builder.plan.run([x, *weights])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        builder.plan.run([x, *weights])
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10
    assert faults < 50, f"{faults} page faults per run"


# Threads and timing


def test_threads_run_different_plans_and_one_plan_at_once() -> None:
    def make() -> Builder:
        builder = Builder()
        _, view = builder.input(torch.empty(64, 64))
        for _ in range(4):
            slot, result = builder.result(torch.empty(64, 64))
            builder.plan.call("aten::tanh", "", [view], [slot])
            view = result
        builder.plan.finalize(0, [slot])
        return builder

    plans, wrong = [make(), make()], []

    def work(plan: Plan, seed: int) -> None:
        x = torch.full([64, 64], seed / 10)
        expected = x.tanh().tanh().tanh().tanh()
        for _ in range(200):
            (output,) = plan.run([x])
            if not torch.equal(output, expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(plans[i % 2].plan, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_profiled_run_times_every_launch(kernels) -> None:
    x = torch.randn(256, 256)
    builder = Builder()
    _, view = builder.input(x)
    out, vout = builder.fresh([256, 256])
    small, _ = builder.fresh([4])
    builder.plan.mm(vout, view, view)
    builder.plan.kernel(kernels("scale"), [(small, 0)], [0, 1])
    builder.plan.finalize(0, [out])
    builder.plan.run([x])
    assert builder.plan.seconds() == [0.0, 0.0]
    builder.plan.run([x], profile=True)
    product, kernel = builder.plan.seconds()
    assert 1 > product > kernel > 0


def test_dtype_numbers_are_those_of_this_pytorch() -> None:
    names = {
        torch.float32: "Float",
        torch.int64: "Long",
        torch.bool: "Bool",
        torch.bfloat16: "BFloat16",
        torch.float8_e4m3fn: "Float8_e4m3fn",
        torch.uint64: "UInt64",
        torch.complex64: "ComplexFloat",
    }
    for dtype, name in names.items():
        assert executor.library().executor_dtype_name(executor.DTYPE_NUMBERS[dtype]).decode() == name
