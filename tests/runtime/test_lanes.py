"""Launches side by side: the executor's lanes, the plans of programs, and the trial that chooses them."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.errors import ExecutionError, Invalid
from daceml_train.lowering.lane_plan import LanePlan, lane_plan
from daceml_train.lowering.lanes import Task
from daceml_train.lowering.program import CallLaunch, Launch
from daceml_train.runtime import bound_plan, machine_load, tune_lanes
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.lane_entries import beside, edges_of
from daceml_train.runtime.lane_works import works
from daceml_train.runtime.same_bits import matrix_of, same_matmul
from daceml_train.runtime.timing import per_launch
from daceml_train.runtime.tune_lanes import Found, LaneStore, LaneTrial
from daceml_train.transformations.global_movement.concurrency import Concurrency
from daceml_train.transformations.pipelines import TRAINING
from tests.runtime.executing import Builder, kernels

__all__ = ["kernels"]
N = 64


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# ---- the executor ----
def chains(kernels: Callable[[str], int], fails: int = -1) -> tuple[Builder, list[torch.Tensor]]:
    """Two chains of three sums, and a launch that adds their ends; launch `fails` throws."""
    tensors = [torch.ones(N) for _ in range(3)]
    builder = Builder()
    slots = [builder.input(t, mutable=True)[0] for t in tensors]
    for i in range(6):
        own = slots[i % 2]
        kernel = kernels("explode" if i == fails else "add")
        builder.plan.kernel(kernel, [(own, 0), (own, 0), (own, 0)], [N], tag=10 + i)
    builder.plan.kernel(kernels("add"), [(slots[2], 0), (slots[0], 0), (slots[1], 0)], [N], tag=16)
    builder.plan.finalize(0, [])
    return builder, tensors


def test_lanes_run_their_launches_and_wait(kernels: Callable[[str], int]) -> None:
    builder, tensors = chains(kernels)
    builder.plan.lanes([[[0, 2, 4], [1, 3, 5, 6]]], [[], [], [], [], [], [], [4]])
    for run in range(1, 30):
        builder.plan.run(tensors)
        assert float(tensors[2][0]) == 2.0 * 8**run
        for tensor in tensors[:2]:
            assert float(tensor[-1]) == 8.0**run
            tensor /= 1
        if run == 20:
            break
    builder.plan.run(tensors, profile=True)
    spans = builder.plan.spans()
    assert spans[6][0] >= max(spans[4][1], spans[5][1]), "the sum begins after both chains"
    assert [end - start for start, end in spans] == pytest.approx(builder.plan.seconds())
    builder.plan.lanes([], [])
    assert torch.get_num_threads() == 2


def test_segments_follow_each_other(kernels: Callable[[str], int]) -> None:
    builder, tensors = chains(kernels)
    builder.plan.lanes([[[0, 1]], [[2, 4], [3, 5]], [[6]]], [[] for _ in range(7)])
    builder.plan.run(tensors, profile=True)
    assert float(tensors[2][0]) == 16.0
    spans = builder.plan.spans()
    assert max(end for _, end in spans[:2]) <= min(start for start, _ in spans[2:6])
    assert max(end for _, end in spans[2:6]) <= spans[6][0]


def test_an_error_in_a_lane_ends_the_region_and_has_the_launch(kernels: Callable[[str], int]) -> None:
    for fails in (0, 3, 5):
        builder, tensors = chains(kernels, fails)
        builder.plan.lanes([[[0, 2, 4], [1, 3, 5, 6]]], [[], [], [1], [0], [3], [2], [4]])
        for _ in range(3):
            with pytest.raises(ExecutionError, match="gave up") as found:
                builder.plan.run(tensors)
            assert found.value.tag == 10 + fails
        assert float(tensors[2][0]) == 1.0, "what waits for a launch that failed does not run"
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("segments", "waits", "message"),
    [
        ([[[0, 1, 2], [3, 4, 5]]], {}, "no lane runs launch 6"),
        ([[[0, 1, 2, 2], [3, 4, 5, 6]]], {}, "each launch once, in the order of the list; launch 2"),
        ([[[1, 0, 2], [3, 4, 5, 6]]], {}, "in the order of the list; launch 0"),
        ([[[0, 1, 2], [3, 4, 5, 6]]], {0: [3]}, "launch 0 waits for 3, which does not run before it"),
        ([[[0, 1, 5, 6]], [[2], [3, 4]]], {6: [4]}, "launch 6 waits for 4"),
    ],
)
def test_lanes_that_could_not_end_are_refused(
    kernels: Callable[[str], int], segments: list[list[list[int]]], waits: dict[int, list[int]], message: str
) -> None:
    builder, _ = chains(kernels)
    with pytest.raises(Invalid, match=message):
        builder.plan.lanes(segments, [waits.get(i, []) for i in range(7)])


# ---- programs ----
class Branches(nn.Module):
    """Experts whose results are concatenated and normalized; a check of data, an index, and dropout."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        expert = [nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(experts)]
        self.experts, self.dropout = nn.ModuleList(expert), nn.Dropout(0.2)
        self.last, self.norm = nn.Linear(16 * experts, 5), nn.BatchNorm1d(16 * experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        return self.last(self.norm(self.dropout(torch.cat([expert(y) for expert in self.experts], 1))))


def trained(steps: int = 6, in_lanes: int | None = None, **options: Any) -> tuple[list[torch.Tensor], list[BoundPlan]]:
    """Losses, parameters, buffers and state of some steps; `in_lanes` is the seed of a random schedule of each plan."""
    torch.manual_seed(3)
    model = Branches()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = dt.training_step(model, F.cross_entropy, optimizer, **options)
    x, y, found = torch.randint(0, 20, (32,)), torch.randint(0, 5, (32,)), []
    for number in range(steps):
        found.append(step(x, y))
        plans = [bound.plan for ways in step._bound.values() for bound in ways]
        for plan in plans if in_lanes is not None and number in (1, 3) else ():
            other = BoundPlan(
                plan.program,
                step._bound[next(iter(step._bound))][-1].step.executable.addresses,
                plan.sizes,
                plan.threads,
                plan.arena,
                plan.products,
                lanes=random_plan(plan, in_lanes + number),
            )
            assert other.lanes is not None and other.lanes.lanes == 2
            plan.adopt(other)
            plan.trial = None
    state = [t for p in model.parameters() for t in optimizer.state[p].values()]
    assert not step.breaks
    return [*found, *(t.detach().clone() for t in (*model.parameters(), *model.buffers(), *state))], plans


def keeps_bits(plan: Any, launch: Launch) -> bool:
    """Whether a launch computes the same bits on one thread; only then does a trial run it beside others."""
    if not isinstance(launch, CallLaunch) or not launch.direct:
        return True
    return same_matmul(launch.target, [matrix_of(a, plan.value) for a in launch.arguments], plan.threads, 1)


def random_plan(plan: BoundPlan, seed: int) -> LanePlan:
    """A schedule from random seconds."""
    draw, tasks = random.Random(seed), []
    for index, launch in enumerate(plan.program.launches):
        one, alone = 10 ** draw.uniform(-6, -4), draw.random() < 0.03
        tasks.append(Task({1: one}, alone=alone or not beside(plan, index) or not keeps_bits(plan, launch)))
    accesses = works(plan, lambda index: not beside(plan, index))
    return lane_plan(accesses, tasks, 2, draw.choice([None, 8]))[0]


@pytest.mark.compiled
@pytest.mark.parametrize("seed", range(4))
def test_lanes_have_the_bits_of_launches_in_order(seed: int) -> None:
    expected, _ = trained(concurrency="off")
    found, plans = trained(in_lanes=100 * seed, concurrency="off")
    assert all(plan.lanes is not None and plan.lanes.lanes == 2 for plan in plans)
    for plan in plans:
        timed = per_launch(plan.order, [1.0] * len(plan.order))
        assert len(timed) == len(plan.program.launches) and min(timed) == 1.0, "each launch has its times"
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


@pytest.mark.compiled
def test_checks_come_before_updates_and_operands_of_a_concatenation_are_independent() -> None:
    _, (plan, *_) = trained(2, concurrency="off")
    edges = edges_of(plan)
    checks = [i for i in range(len(edges)) if not beside(plan, i)]
    assert checks, "the classes are checked"
    before: list[set[int]] = []
    for own in edges:
        before.append(set(own).union(*(before[p] for p in own)))
    slots = plan.program.slots
    updates = [
        i
        for i, work in enumerate(works(plan, lambda index: not beside(plan, index)))
        if any(a.space >= 0 and slots[a.space].mutable for a in work.writes)
    ]
    assert updates
    for i in updates:
        assert {c for c in checks if c < i} <= before[i], "an update runs after all checks that precede it"
    writers: dict[int, list[int]] = {}
    for i, work in enumerate(works(plan, lambda index: not beside(plan, index))):
        for access in work.writes:
            if access.space >= 0 and access.stop > 1:
                writers.setdefault(access.space, []).append(i)
    assert any(i not in before[j] for own in writers.values() for i in own for j in own if i < j), (
        "experts write their columns of one array independently"
    )


# ---- the trial ----
class Machine:
    """Seconds of runs, by what runs: in place of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
        self.now, self.gain = 0.0, gain
        monkeypatch.setattr(machine_load, "waited", lambda: 0.0)
        monkeypatch.setattr(bound_plan, "contention_of", lambda bound: None)
        monkeypatch.setattr(tune_lanes.time, "perf_counter", lambda: self.now)
        plainly = LaneTrial._plainly

        def run(trial: LaneTrial, bound: Any, inputs: Any, profile: bool = False) -> Any:
            self.now += 1e-3 if bound.lanes is None else 1e-3 / self.gain
            return plainly(trial, bound, inputs, profile)

        monkeypatch.setattr(LaneTrial, "_plainly", run)
        monkeypatch.setattr(LaneTrial, "tasks", lambda trial, seconds: even(trial))


def even(trial: LaneTrial) -> list[Task]:
    """Launches of a tenth of a millisecond each."""
    bound = trial.bound
    launches = enumerate(bound.program.launches)
    return [Task({1: 1e-4}, alone=not (beside(bound, i) and keeps_bits(bound, x))) for i, x in launches]


def trial_of(plans: list[BoundPlan]) -> LaneTrial:
    (trial,) = (plan.trial for plan in plans if plan.trial is not None)
    return trial


@pytest.mark.compiled
@pytest.mark.parametrize("gain", [1.5, 1.0])
def test_lanes_are_used_where_they_are_faster_and_a_warm_start_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    Machine(monkeypatch, gain)
    monkeypatch.setattr(LaneTrial, "proposed", forced(LaneTrial.proposed))
    roomy = TRAINING.replace(Concurrency, Concurrency(memory=8.0))  # the arrays are smaller than their alignment
    expected, _ = trained(26, cache=tmp_path, concurrency="off")
    found, plans = trained(26, cache=tmp_path, pipeline=roomy)
    trial = trial_of(plans)
    assert trial.done and trial.measured == tune_lanes.TIMED + 2 * tune_lanes.TURNS
    assert (trial.bound.lanes is not None) == (gain > 1)
    assert all(map(torch.equal, expected, found))
    warm, plans = trained(26, cache=tmp_path, pipeline=roomy)
    assert trial_of(plans).measured == 0 and (trial_of(plans).bound.lanes is not None) == (gain > 1)
    assert all(map(torch.equal, expected, warm))
    (stored,) = tmp_path.rglob("lanes.json")
    ((key, entry),) = json.loads(stored.read_text()).items()
    assert "2 threads" in key and bool(entry["order"]) == (gain > 1)


def forced(proposed: Any) -> Any:
    """A proposal from the even tasks, of which a run in order takes the sum."""
    return lambda trial, seconds: proposed(trial, [1e-4] * len(seconds))


@pytest.mark.compiled
def test_what_the_pass_forbids_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 2.0)
    for pipeline in (TRAINING.without(Concurrency), TRAINING.replace(Concurrency, Concurrency(lanes=1))):
        _, plans = trained(2, cache=tmp_path, pipeline=pipeline)
        assert all(plan.trial is None for plan in plans)
    _, plans = trained(12, cache=tmp_path, pipeline=TRAINING.replace(Concurrency, Concurrency(memory=1.0)))
    trial = trial_of(plans)
    plan = trial.proposed([1e-4] * len(trial.bound.program.launches))
    assert plan is None or trial.bound.arena_for(plan)[2] <= trial.bound.arena_bytes


def test_a_stored_schedule_is_checked(tmp_path: Path) -> None:
    edges = [[], [0], [], [1, 2]]
    plan = LanePlan([0, 2, 1, 3], [[[0, 1], [2]], [[3]]], overlap={2: 2})
    store = LaneStore(tmp_path / "lanes.json")
    store.save("a", Found.of(plan, (2.0, 1.0)))
    store.save("b", Found.of(None))
    known = LaneStore(tmp_path / "lanes.json").known()
    read = known["a"].plan(edges)
    assert read is not None and (read.order, read.segments, read.overlap) == (plan.order, plan.segments, plan.overlap)
    assert known["b"].plan(edges) is None
    assert known["a"].plan([*edges, []]) is None, "it is of another program"
    assert known["a"].plan([[3], [0], [], [1, 2]]) is None, "it contradicts a dependence"
    (tmp_path / "lanes.json").write_text('{"a": {"order": 3}}')
    assert store.known() == {}
