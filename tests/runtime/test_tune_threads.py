"""The threads of launches: found in the first runs, kept on disk, and without effect on any bit of a result."""

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.errors import ExecutionError, Invalid
from daceml_train.runtime import bound_plan, machine_load, tune_matmul
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.launch_threads import LaunchThreads
from daceml_train.runtime.native_build import build
from daceml_train.runtime.same_bits import PURE, same_matmul
from daceml_train.runtime.tune_threads import GAIN, LEAST, Adjustable, ThreadSearch, ThreadTuner, Times
from tests.runtime.executing import Builder

KERNELS = """
#include <omp.h>
#include <cstdint>
#include <stdexcept>
#define KERNEL extern "C" __attribute__((visibility("default"))) void
KERNEL allowed(void** p, const int64_t*) { *(float*)p[0] = omp_get_max_threads(); }
KERNEL fails(void**, const int64_t*) { throw std::runtime_error("the kernel gave up"); }
"""

Spent = Callable[[int, int], float]
"""Launch, threads -> seconds."""


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


# ---- the executor ----
@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], int]:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "threads.cpp").write_text(KERNELS)
    native = ctypes.CDLL(str(build(folder / "threads.cpp", folder / "cache")))
    return lambda name: ctypes.cast(getattr(native, name), ctypes.c_void_p).value or 0


def test_each_launch_has_its_threads(kernels: Callable[[str], int], four_threads: None) -> None:
    outputs, builder = [torch.zeros(1) for _ in range(5)], Builder()
    for out in outputs:
        slot, _ = builder.input(out, mutable=True)
        builder.plan.kernel(kernels("allowed"), [(slot, 0)])
    builder.plan.finalize(0, [])
    builder.plan.threads([0, 1, -1, 64, 2])
    builder.plan.run(outputs)
    assert [int(out) for out in outputs] == [4, 1, 1, 4, 2]
    assert torch.get_num_threads() == 4
    builder.plan.threads([])
    builder.plan.run(outputs)
    assert [int(out) for out in outputs] == [4] * 5
    with pytest.raises(Invalid, match="the plan has 5 launches, given threads for 2"):
        builder.plan.threads([1, 1])


def test_a_launch_that_fails_leaves_the_threads_as_they_were(kernels: Callable[[str], int], four_threads: None) -> None:
    builder = Builder()
    builder.plan.kernel(kernels("fails"), [])
    builder.plan.finalize(0, [])
    builder.plan.threads([1])
    with pytest.raises(ExecutionError, match="gave up"):
        builder.plan.run([])
    assert torch.get_num_threads() == 4


# ---- the search ----
def searched(spent: Spent, launches: Sequence[Adjustable | None], threads: int, tuner: ThreadTuner) -> ThreadSearch:
    """A search that is told these seconds until it is done."""
    search = tuner.search(launches, threads)
    assert search is not None
    while not search.done:
        search.add([spent(i, count or threads) for i, count in enumerate(search.counts)])
        assert search.runs < 100
    return search


def scaling(work: Sequence[float], fork: float = 2e-6) -> Spent:
    """Work that is shared out, after a fork that each doubling makes longer."""
    return lambda i, count: work[i] / count + (fork * (1 + math.log2(count)) if count > 1 else 0)


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16, 64, 68])
@pytest.mark.parametrize("work", [[1e-6] * 5, [1e-3] * 4, [1e-6, 2e-5, 1e-4, 5e-4, 1e-6], [3e-5, 3e-5]])
def test_the_choice_is_the_best_one_or_near(threads: int, work: list[float]) -> None:
    spent = scaling(work)
    found = searched(spent, [Adjustable(str(i)) for i in range(len(work))], threads, ThreadTuner())
    halves = [threads >> by for by in range(threads.bit_length() - 1)]
    best = min(sum(min(spent(i, 1), spent(i, many)) for i in range(len(work))) for many in halves)
    taken = sum(spent(i, count or threads) for i, count in enumerate(found.counts))
    slack = sum(max(GAIN * spent(i, 1), LEAST) for i in range(len(work)))
    assert taken <= 1.05 * best + slack
    assert found.runs <= 3 * math.log2(threads) + 4


def test_what_may_not_be_chosen_keeps_all_threads() -> None:
    asked: list[int] = []

    def unequal(count: int) -> bool:
        asked.append(count)
        return False

    launches = [None, Adjustable("kernel"), Adjustable("matmul", unequal), Adjustable("long kernel")]
    tried: list[list[int]] = []
    tuner, work = ThreadTuner(), [1e-6, 1e-6, 1e-6, 5e-3]

    def spent(i: int, count: int) -> float:
        tried.append([i, count])
        return scaling(work)(i, count)

    assert searched(spent, launches, 4, tuner).counts == [0, 1, 0, 0]
    assert {count for i, count in tried if i in (0, 2)} == {4}
    assert [3, 1] not in tried, "a long launch was tried on one thread"
    assert asked.count(1) == 1, "the bits are compared once"


def test_times_are_kept_and_a_warm_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)  # a choice under load does not last
    path, launches = tmp_path / "threads.json", [Adjustable("a"), Adjustable("b")]
    first = searched(scaling([1e-6, 1e-3]), launches, 2, ThreadTuner(path))
    assert first.counts == [1, 0]
    warm = ThreadTuner(path).search(launches, 2)
    assert warm is not None and warm.done and warm.runs == 0 and warm.counts == [1, 0]
    for other in (ThreadTuner(path).search(launches, 4), ThreadTuner(path).search([*launches, Adjustable("c")], 2)):
        assert other is not None and not other.done, "other threads, or another launch, are measured"
    (one, two) = (launch.key(2) for launch in launches)
    assert "cores of" in one and one != two
    path.write_text(path.read_text()[:-9])
    damaged = ThreadTuner(path).search(launches, 2)
    assert damaged is not None and not damaged.done


def test_a_choice_under_load_is_marked_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, launches = tmp_path / "threads.json", [Adjustable("a")]
    clock = itertools.count()
    monkeypatch.setattr(machine_load, "waited", lambda: 1.0 * next(clock))
    assert searched(scaling([1e-6]), launches, 2, ThreadTuner(path)).loaded
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)
    found = ThreadTuner(path).search(launches, 2)
    assert found is not None and not found.done
    assert not searched(scaling([1e-6]), launches, 2, ThreadTuner(path)).loaded
    found = ThreadTuner(path).search(launches, 2)
    assert found is not None and found.done


def test_further_threads_must_save_enough() -> None:
    assert Times({1: 1.00e-3, 2: 0.97e-3}).best(2) == 1
    assert Times({1: 1.00e-3, 2: 0.80e-3}).best(2) == 2
    assert Times({1: 1.0e-6, 2: 0.7e-6}).best(2) == 1
    assert Times({4: 1e-3}, [2]).best(2) == 4, "a count that changes bits was not tried"


# ---- bits ----
@pytest.mark.parametrize("name", ["mm", "addmm", "bmm"])
def test_the_bits_of_a_matmul_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f32, batch = torch.float32, (3,) if name == "bmm" else ()
    steps = (16 * 16,) if batch else ()
    matrix = (f32, (*batch, 16, 16), (*steps, 16, 1))
    matrices = [matrix, *([matrix] if name == "addmm" else []), matrix, matrix]
    assert same_matmul(name, matrices, 2, 1)
    runs = []
    monkeypatch.setattr(torch, "equal", lambda a, b: runs.append((a.clone(), b.clone())) or True)
    same_matmul(name, matrices, 2, 1)
    ((all_threads, one),) = runs
    assert all_threads.abs().sum() > 0 and bool((all_threads == one).all())


def network() -> nn.Module:
    """Kernels that several threads share: elementwise ones, normalization, and the sums of their gradients."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.Tanh())


def trained(threads: int, force: int | None = None, **options: Any) -> tuple[list[torch.Tensor], list[BoundPlan]]:
    """Losses, parameters, momenta of ten steps; `force` is the count of every launch that a search may give it to."""
    before, model = torch.get_num_threads(), network()
    torch.set_num_threads(threads)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = dt.training_step(model, F.mse_loss, optimizer, **options)
        x, y, losses = torch.randn(512, 96), torch.randn(512, 256), []
        for _ in range(12):
            losses.append(step(x, y))
            for plan in (bound.plan for ways in step._bound.values() for bound in ways) if force else ():
                launches = LaunchThreads(plan, ThreadTuner()).adjustable()
                adjusted = [launch is not None and launch.same(force) for launch in launches]
                assert sum(adjusted) > 3
                plan.plan.threads([force if adjusted[launch] else 0 for launch in plan.order])
        assert not step.breaks
        momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        plans = [bound.plan for ways in step._bound.values() for bound in ways]
        return [*losses, *(p.detach() for p in model.parameters()), *momenta], plans
    finally:
        torch.set_num_threads(before)


def seeded(threads: int, **options: Any) -> tuple[list[torch.Tensor], list[BoundPlan]]:
    torch.manual_seed(2)
    return trained(threads, **options)


def searches(plans: list[BoundPlan]) -> list[ThreadSearch]:
    found = [plan.launch_threads.search for plan in plans if plan.launch_threads is not None]
    searched = [search for search in found if search is not None]
    assert len(searched) == len(plans)
    return searched


@pytest.mark.compiled
@pytest.mark.parametrize("force", [1, 2, 3])
def test_results_are_the_same_bits_on_any_number_of_threads(
    force: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_matmul, "measure", lambda product: "blas")  # under load, each step chooses a library
    expected, plans = seeded(4, concurrency="off", cache=tmp_path)
    assert all(plan.launch_threads is None for plan in plans)
    found, _ = seeded(4, concurrency="off", cache=tmp_path, force=force)
    assert all(map(torch.equal, expected, found))


@pytest.mark.compiled
def test_steps_that_search_are_those_of_eager_execution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)  # other processes may have the machine
    monkeypatch.setattr(bound_plan, "contention_of", lambda bound: None)
    found, plans = seeded(2, cache=tmp_path)
    assert all(search.done for search in searches(plans))
    assert all(search.runs == 7 for search in searches(plans))
    fixed, _ = seeded(2, cache=tmp_path, concurrency="off")
    assert all(map(torch.equal, found, fixed))
    warm, plans = seeded(2, cache=tmp_path)
    assert all(search.runs == 0 for search in searches(plans))
    assert all(map(torch.equal, found, warm))
    losses: list[torch.Tensor] = []
    torch.manual_seed(2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(512, 96), torch.randn(512, 256)
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    eager = [*losses, *(p.detach() for p in model.parameters())]
    for ours, theirs in zip(found, eager, strict=False):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.compiled
def test_convolutions_are_adjusted_where_their_bits_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)
    monkeypatch.setattr(bound_plan, "contention_of", lambda bound: None)
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = []
        for options in ({"concurrency": "off"}, {}):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten()
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = dt.training_step(model, F.mse_loss, optimizer, **options)  # type: ignore[arg-type]
            x, y = torch.randn(4, 3, 12, 12), torch.randn(4, 800)
            losses = [step(x, y) for _ in range(10)]
            found.append([*losses, *(p.detach() for p in model.parameters())])
        (plan,) = (bound.plan for ways in step._bound.values() for bound in ways)
        calls = [i for i, launch in enumerate(plan.program.launches) if getattr(launch, "target", "") in PURE]
        adjusted = LaunchThreads(plan, ThreadTuner()).adjustable()
        assert calls and all(adjusted[i] is not None for i in calls)
        launches = [launch for i in calls if (launch := adjusted[i]) is not None]
        assert any(launch.same(1) for launch in launches)
        assert all(map(torch.equal, *found))
        monkeypatch.setattr(torch, "equal", lambda a, b: False)
        assert not any(launch.same(1) for launch in launches)
    finally:
        torch.set_num_threads(before)
