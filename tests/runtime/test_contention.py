"""Threads drop to one where others have the cores, and climb again; results keep their bits."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.runtime import bound_plan, contention
from daceml_train.runtime.contention import LONGEST, LOOKS, ONE_RUNS, Contention, Cores, crowded, quota


class Machine:
    """Cores of which some are idle; a step takes a millisecond on two threads, two on one, 50 where a core is taken."""

    def __init__(self, **options: Any) -> None:
        self.taken, self.uses, self.looks = False, list[bool](), 0
        self.contention = Contention(2, self.uses.append, self._cores, **options)

    def _cores(self) -> float:
        self.looks += 1
        return 0.0 if self.taken else 1.0

    def step(self) -> float:
        seconds = 2e-3 if not self.contention.many else 5e-2 if self.taken else 1e-3
        self.contention.add(seconds)
        return seconds


def test_threads_drop_when_a_core_is_taken_and_climb_when_it_is_idle() -> None:
    machine = Machine()
    for _ in range(50):
        machine.step()
    assert machine.contention.many and machine.uses == []
    machine.taken = True
    seconds = [machine.step() for _ in range(1900)]
    assert sum(s > 1.5 * 2e-3 for s in seconds) == contention.SLOW_RUNS, "no step after it was noticed"
    assert machine.uses == [False]
    machine.taken = False
    seconds = [machine.step() for _ in range(int(2 * LOOKS / 2e-3))]
    assert machine.uses == [False, True] and seconds[-1] == 1e-3


def test_climbing_too_early_is_tried_less_and_less_often() -> None:
    machine = Machine()
    for _ in range(10):
        machine.step()
    machine.taken, machine.contention._cores = True, lambda: 1.0  # the system says that they are idle
    seconds = [machine.step() for _ in range(20_000)]
    slow = sum(s > 3e-3 for s in seconds)
    assert slow <= contention.SLOW_RUNS * (2 + math.log2(LONGEST / LOOKS))
    assert machine.uses.count(True) <= 1 + math.log2(LONGEST / LOOKS)


def test_one_slow_run_and_what_is_slower_on_one_thread_change_nothing() -> None:
    uses: list[bool] = []
    one = Contention(2, uses.append, lambda: 0.0)
    for i in range(100):
        one.add(5e-2 if i % 10 == 5 else 1e-3)
    assert uses == []
    for _ in range(contention.SLOW_RUNS):
        one.add(4.5e-3)  # a drift, not a core that is taken
    assert uses == [False]
    for _ in range(contention.ONE_RUNS):
        one.add(5e-3)
    assert uses == [False, True] and one.many
    for _ in range(100):
        one.add(4.5e-3)
    assert uses == [False, True]


def test_a_core_that_is_taken_in_part_is_noticed_and_compared() -> None:
    """Twice as long on two threads, 1.2 times as long on one: no step after it was noticed takes longer than that."""
    uses: list[bool] = []
    taken = Contention(2, uses.append, lambda: 0.0)
    for _ in range(20):
        taken.add(1e-3)
    seconds = []
    for _ in range(500):
        seconds.append(2e-3 if taken.many else 1.2e-3)
        taken.add(seconds[-1])
    assert seconds.count(2e-3) == contention.DRIFTED_RUNS and uses == [False]


def test_a_drift_for_which_one_thread_is_no_remedy_costs_a_few_runs() -> None:
    uses: list[bool] = []
    drift = Contention(2, uses.append, lambda: 0.0)
    for i in range(2000):
        drift.add(1e-3 if i < 50 else 2e-3 if drift.many else 2.2e-3)
    assert uses == [False, True] and drift.many


@pytest.mark.parametrize("slow", [5e-2, 0.5])
def test_the_chosen_threads_are_tried_again_however_busy_the_cores_are(slow: float) -> None:
    """At a twentieth of the time at most, and seldomer while it is in vain."""
    uses: list[bool] = []
    busy = Contention(2, uses.append, lambda: 0.0)
    for _ in range(10):
        busy.add(1e-3)
    spent = lost = 0.0
    while spent < 3 * LONGEST:
        now = slow if busy.many else 2e-3
        spent += now
        lost += (now - 2e-3) * (uses != [])
        busy.add(now)
    assert 2 < uses.count(True) < 7 and lost < 0.06 * spent
    while not busy.many or not uses[-1]:
        busy.add(2e-3)
    for _ in range(100):
        busy.add(1e-3)
    assert uses[-1] and busy.many


def test_a_process_that_takes_turns_with_others_keeps_its_threads() -> None:
    """No core is idle whenever it looks, and the runs after each turn of the others are slow."""
    turns = Contention(2, lambda many: None, lambda: 0.0)
    many = 0
    for run in range(20_000):
        waking = run % 15 < 10 and 300 < run < 1000  # some turns begin so badly that threads drop
        turns.add((16e-3 if waking else 8e-3) if turns.many else 11.5e-3)
        many += turns.many
    assert turns.many and many > 0.9 * 20_000


def test_a_quota_below_the_threads_is_one_thread() -> None:
    machine = Machine(limit=1.5)
    assert machine.uses == [False]
    for _ in range(5000):
        machine.step()
    assert machine.uses == [False] and not machine.contention.many
    assert Machine(limit=2.0).uses == []


@pytest.mark.parametrize(
    ("many", "uses"),
    [(1.0, [False, True]), (1.3, [False, True]), (3.0, [False, True, False]), (5.0, [False, True, False])],
)
def test_a_crowded_start_compares(many: float, uses: list[bool]) -> None:
    """The chosen threads run after some runs on one, and stay unless they are slower."""
    found: list[bool] = []
    busy = Contention(2, found.append, cores=lambda: 0.0)
    busy.wait()
    for _ in range(ONE_RUNS + 20):
        busy.add(many * 1e-3 if busy.many else 1e-3)
    assert found == uses


def test_the_quota_of_the_control_group_is_read(tmp_path: Path) -> None:
    assert quota(tmp_path) == math.inf
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(tmp_path) == math.inf
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("?")
    assert quota(tmp_path) == math.inf


def test_idle_cores_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stat = [0.0], tmp_path / "stat"
    monkeypatch.setattr(contention.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(contention.os, "sysconf", lambda name: 100)
    stat.write_text("cpu 9 9 9 9\ncpu0 1 1 1 100 0\ncpu1 1 1 1 200 50\ncpu2 1 1 1 900 0\n")
    cores = Cores(stat)
    clock[0] = 2.0
    stat.write_text("cpu 9 9 9 9\ncpu0 1 1 1 300 0\ncpu1 1 1 1 250 100\ncpu2 1 1 1 9900 0\n")
    assert cores.idle() == pytest.approx(1.5)
    assert Cores(tmp_path / "missing").idle() == 0.0
    assert crowded() in (True, False)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.compiled
def test_steps_on_one_thread_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step, x, losses = dt.training_step(model, F.mse_loss, optimizer, **options), torch.randn(512, 8), []
        for number in range(8):
            losses.append(step(x, x))
            for plan in (bound.plan for ways in step._bound.values() for bound in ways) if made else ():
                plan.contention.use(number % 3 == 2)
        return [*losses, *(p.detach() for p in model.parameters())]

    made: list[Contention] = []

    def quiet(bound: Any) -> Contention:
        made.append(Contention(2, lambda many: bound.launch_threads.use(many), lambda: 0.0))
        monkeypatch.setattr(made[-1], "add", lambda seconds: None)
        return made[-1]

    monkeypatch.setattr(bound_plan, "contention_of", quiet)
    expected = trained(concurrency="off")
    assert not made
    found = trained()
    assert made and all(map(torch.equal, expected, found))


@pytest.mark.compiled
def test_calls_of_modules_are_told_too(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    told: list[float] = []

    class Told:
        many = False

        def __init__(self, bound: Any) -> None:
            pass

        def add(self, seconds: float) -> None:
            told.append(seconds)

    monkeypatch.setattr(bound_plan, "contention_of", Told)
    module = dt.optimize(torch.nn.Linear(4, 4))
    with torch.no_grad():
        for _ in range(3):
            module(torch.ones(2, 4))
    assert len(told) == 3 and min(told) > 0, "a plan that begins on one thread climbs again"
