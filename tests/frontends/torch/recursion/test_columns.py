"""Native functions of many runs or values: the same as those of Python, on the same objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from daceml_train.frontends.torch.recursion import columns
from daceml_train.frontends.torch.recursion.lazy import RECORDER, Lazy, lazy_of, meta
from daceml_train.frontends.torch.recursion.repeats import MISS, Numbers, Place, entry, repeat
from daceml_train.frontends.torch.recursion.runs import Pick, Run, Step, run_of
from daceml_train.runtime.records import functions

TYPE, OTHER = (meta((1, n), torch.float32, torch.device("cpu"), True) for n in (3, 4))


@pytest.fixture(params=["python", "native"])
def way(request: Any) -> Iterator[str]:
    """Functions of Python, or native ones."""
    before = {name: f for name in ("record", "entry") if (f := columns.native(name))}
    found = functions(Lazy, Run, RECORDER, MISS)
    assert found
    columns.use_native(found if request.param == "native" else {})
    yield request.param
    columns.use_native(found if before else {})


class Calls:
    """The part of a recorder that records need."""

    def __init__(self) -> None:
        self.pending: list[Run] = []
        self.last: dict[Any, Any] = {}
        self.shared: dict[int, Any] = {}


def runs(structures: list[Step]) -> list[Run]:
    """Runs of several structures and heights, each of which has read the one before it."""
    found: list[Run] = []
    for k in range(12):
        run = run_of(None, structures[k % 2], outer=False)
        run.height, run.stage = (7 * k) % 5, k % 3
        run.inputs = [found[-1].values[0] if found else torch.zeros(1), [k]]
        run.values = [lazy_of(run, 0, TYPE), lazy_of(run, 1, OTHER)]
        found.append(run)
    return found


def test_runs(way: str) -> None:
    ends = [Step(operator=("an operator",)), Step()]
    found = runs(ends)
    idle = run_of(None, ends[1], outer=False)
    stages = columns.seal([*found[:6], idle, *found[6:]])
    assert stages == {stage: [run for run in found[::2] if run.stage == stage] for stage in (0, 2, 1)}
    assert all(run.sealed for run in [*found, idle]), "also those that compute nothing"
    groups = columns.by_structure(found)
    assert list(groups) == ends
    for k, end in enumerate(ends):
        assert groups[end] == sorted(found[k::2], key=lambda run: run.height)
        assert columns.heights(groups[end]).tolist() == [run.height for run in groups[end]]
        first, second = columns.inputs(groups[end])
        assert first == [run.inputs[0] for run in groups[end]] and second == [run.inputs[1] for run in groups[end]]
    forest = object()
    columns.place(found[:3], "group", 5)
    columns.place(found[3:6], "other", 0, forest)
    assert [(r.group, r.position, r.forest) for r in found[:6]] == [
        *[("group", 5 + k, None) for k in range(3)],
        *[("other", k, forest) for k in range(3)],
    ]
    columns.release(found)
    assert {(run.height, run.stage, run.inputs, run.values) for run in found} == {(0, 0, (), ())}


def test_values(way: str) -> None:
    found = runs([Step(), Step()])
    columns.place(found, "a", 3)
    forest = object()
    columns.place(found[4:], "b", 0, forest)
    values = [value for run in found for value in run.values]
    assert columns.unknown(values) and not columns.unknown([*values, 1]) and columns.unknown([])
    assert columns.metas(values) == {TYPE, OTHER} and columns.metas(values[::2]) == {TYPE}
    assert columns.outputs(values) == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    assert columns.positions(values[1::2]).tolist() == [3, 4, 5, 6, *range(8)]
    assert columns.positions(values).dtype == np.int64
    assert columns.all_of(values[8:], forest) and not columns.all_of(values[7:], forest)
    pick = lazy_of(Pick(torch.zeros(2, 3), 1, None), 0, TYPE)
    assert columns.sources(values[:4]) == (False, {("a", 0), ("a", 1)})
    for other in (values[8], pick, torch.zeros(1), [1]):
        assert columns.sources([values[0], other]) == (True, {("a", 0)})
        assert not columns.all_of([values[8], other], forest) or other is values[8]
    values[2].value = torch.zeros(1)
    assert not columns.unknown(values)


def test_use_seals_runs_whose_values_wait(way: str) -> None:
    found = runs([Step(), Step()])
    columns.place(found[2:3], "b", 0, object())
    values = [run.values[1] for run in found[:4]]
    values[1].value = torch.zeros(1)
    assert columns.use(values) == 2  # after stage 0 of the first, in stage 2 of the computed one, after 0 of the last
    assert [run.used for run in found[:4]] == [{1}, set(), set(), {1}]
    assert [run.sealed for run in found[:4]] == [True, False, False, True]


def test_a_record_is_repeated_for_operands_like_those_it_was_made_for(way: str) -> None:
    end = Step()
    module, below = torch.nn.Linear(2, 2), run_of(None, Step(), outer=False)
    below.height, below.stage = 4, 1
    value = lazy_of(below, 3, TYPE)
    operands: Any = [TYPE, [TYPE, OTHER], Numbers(2, int), module, (int, 2), (float, 0.0), (str, "x")]
    template = (tuple, 1, Place(1, 0), (list, 0, Place(0)))
    inputs = [Place(0), Place(2), Place(1, 1)]
    repeated = repeat(end, True, operands, inputs, (TYPE, OTHER, TYPE), template)
    recorder = Calls()
    pair = [lazy_of(below, 0, TYPE), lazy_of(Pick(torch.zeros(2, 3), 1, None), 0, OTHER)]
    given: list[Any] = [value, pair, [5, 6], module, 2, 0.0, "x"]
    result = repeated(recorder, *given)
    (run,) = recorder.pending
    assert (run.at, run.recorder, run.height, run.stage, run.sealed, run.outer) == (end, recorder, 5, 1, True, False)
    assert run.inputs == (value, given[2], pair[1]) and run.used == frozenset({0, 1})
    assert [v is None for v in run.values] == [False, False, True] and below.used == {3}
    assert result[0] is run.values[1] and result[1] is pair[0] and result[2] == [run.values[0], value]
    assert (result[0].source, result[0].index, result[0].meta, result[0].value) == (run, 1, OTHER, None)
    others: list[tuple[int, Any]] = [(0, pair[1]), (0, 1), (1, pair[::-1]), (1, (*pair,)), (1, [value]), (2, [5, 6.0])]
    others += [(2, [5]), (3, torch.nn.Linear(2, 2)), (4, 3), (4, True), (5, -0.0), (5, 0), (6, "y")]
    for position, other in others:
        assert repeated(recorder, *given[:position], other, *given[position + 1 :]) is MISS, (position, other)
    value.value = torch.zeros(1, 3)
    assert repeated(recorder, *given) is MISS, "a value that is known"
    value.value = None
    with torch.no_grad():
        assert repeated(recorder, *given) is MISS, "without gradients"
    assert len(recorder.pending) == 1


def test_entries_call_what_is_there_to_repeat(way: str) -> None:
    calls: list[Any] = []
    block = object()
    called = entry(2, block, lambda *a: calls.append(("rest", *a)))
    called(1, 2)
    recorder = Calls()
    token = RECORDER.set(recorder)
    try:
        called(3, 4)
        recorder.last[block] = lambda r, *a: "found" if a[0] else MISS
        assert (called(1, 5), called(0, 6)) == ("found", None)
        recorder.last[block] = lambda *a: 1 / 0
        with pytest.raises(ZeroDivisionError):
            called(1, 7)
    finally:
        RECORDER.reset(token)
    assert calls == [("rest", 1, 2), ("rest", 3, 4), ("rest", 0, 6)]


def test_records_and_entries_are_collected_with_what_refers_to_them(way: str) -> None:
    class Owner(torch.nn.Module):
        pass

    owner: Any = Owner()
    owner.repeated = repeat(Step(), True, [owner], [], (TYPE,), 0)
    owner.entry = entry(1, owner, owner.forward)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
