"""The native executor: memory of results, the pool, arenas, threads and times."""

import gc
import random
import resource
import threading

import pytest
import torch

from daceml_train.runtime import native_library, torch_numbers
from daceml_train.runtime.executor import Arena, Plan
from daceml_train.runtime.native_library import pool_statistics, pool_trim, pooled
from tests.runtime.executing import Builder

pytestmark = pytest.mark.compiled


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


def test_the_pool_serves_only_within_its_gate() -> None:
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
        assert native_library.library().executor_dtype_name(torch_numbers.DTYPE_NUMBERS[dtype]).decode() == name
