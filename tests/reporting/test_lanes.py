"""Threads and lanes in reports and traces."""

import dataclasses
from typing import Any

from daceml_train.reporting.model import Compiled, Contents, Launched
from daceml_train.reporting.text import shared_out
from daceml_train.reporting.trace import events, started


def launched(seconds: float, place: tuple[int, int, int] | None = None, threads: int = 1) -> Launched:
    return Launched(0, "kernel", "op", "k", "", "", "forward", 8, 1, seconds, threads=threads, place=place)


LAUNCHES = (
    launched(1.0, (0, 0, 0), 2),
    launched(2.0, (1, 0, 2)),
    launched(5.0, (1, 1, 1)),
    launched(2.0, (1, 0, 3)),
    launched(1.0, (2, 0, 4), 2),
)


def test_lanes_begin_together_and_a_segment_follows_the_longest_lane() -> None:
    assert started(LAUNCHES) == [0.0, 1.0, 1.0, 3.0, 6.0]
    in_order = [dataclasses.replace(launch, place=None) for launch in LAUNCHES]
    assert started(in_order) == [0.0, 1.0, 3.0, 8.0, 10.0]


def function(launches: tuple[Launched, ...]) -> Compiled:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Compiled)}
    return Compiled(**{**fields, "name": "f", "launches": launches, "memory": (), "programs": 1})


def test_the_trace_has_a_thread_per_lane() -> None:
    contents = Contents("step", "model", (function(LAUNCHES),), ())
    found = [event for event in events(contents)["traceEvents"] if event["ph"] == "X"]
    assert [event["tid"] for event in found] == [0, 0, 2, 0, 0]
    assert [event["ts"] for event in found] == [0.0, 1e6, 1e6, 3e6, 6e6]
    assert [event["args"]["threads"] for event in found] == [2, 1, 1, 1, 2]


def test_arrows_come_from_what_a_launch_waits_for_in_other_lanes() -> None:
    waits = ((), (0,), (0,), (1,), (0, 1, 2, 3))
    launches = tuple(dataclasses.replace(one, before=before) for one, before in zip(LAUNCHES, waits, strict=True))
    backward = dataclasses.replace(LAUNCHES[0], program=1), dataclasses.replace(LAUNCHES[0], program=1, before=(0,))
    contents = Contents("step", "model", (function((*launches, *backward)),), ())
    told = events(contents)["traceEvents"]
    arrows = [event for event in told if event["ph"] in "sf"]
    pairs = {(s["id"], s["tid"], f["tid"]) for s, f in zip(arrows[::2], arrows[1::2], strict=True)}
    assert pairs == {("0.0.2", 0, 2), ("0.2.4", 2, 0)}
    complete = [event for event in told if event["ph"] == "X"]
    for event in arrows:  # each lies within one event of its thread
        around = [x for x in complete if x["tid"] == event["tid"] and x["ts"] < event["ts"] < x["ts"] + x["dur"]]
        assert len(around) == 1 and (event["ph"] == "s" or event["bp"] == "e")


def test_the_report_counts_threads_and_lanes() -> None:
    text = shared_out(function(LAUNCHES))
    assert text == "launches on 1 thread: 3, launches on 2 threads: 2, side by side in up to 2 lanes: 3"
    assert shared_out(function(tuple(launched(1.0, threads=2) for _ in range(3)))) == ""
