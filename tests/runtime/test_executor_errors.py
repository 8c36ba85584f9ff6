"""The native executor: what it refuses, inputs that do not fit, and errors of launches."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from daceml_train.errors import ExecutionError, Invalid
from daceml_train.runtime.executor import InputMismatch, Plan, PlanView
from daceml_train.runtime.native_library import pool_statistics
from tests.runtime.executing import F32, Builder

pytestmark = pytest.mark.compiled


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
    refused("ends at 40, past the arena of 39 bytes", lambda builder, _: [builder.arena(16, [6])[0]][:0], 39)


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
    with pytest.raises(InputMismatch, match="without storage of its own"):
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
        with pytest.raises(ExecutionError, match=r"KeyError: 'no such thing'(.|\n)*test_executor_errors.py") as caught:
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
