"""The page of what `benchmarks.trials` found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.provenance import origin

HEAD = """# Searches by stages

Generated; do not edit. To measure again:

    .venv/bin/python -m benchmarks.trials            # all rows: about ten minutes on two cores
    .venv/bin/python -m benchmarks.trials late       # one row

[Searches by stages](../guide/search.md) tells what stages are. *Steps* are training steps: of separate trials, and of
stages; in brackets, the number of distinct steps, which no merging can beat. *Equal* means equal to the bit: for the
first row every parameter, buffer, tensor of the optimizer, and generator at the end of each trial; for Optuna all
values that it was told and its best trial; for the residual network the values of two trials; for kills the values of
an undisturbed search. Times are wall clock without compilation; those of processes include their start. Seconds of
Optuna's rows and of the residual network are of a machine that ran other programs, too: compare their steps. The space
*late drops* has two rates, and two drops by four factors at two steps each.

Optuna's rows have the settings of the study from which their goals of 3.1, 3.4, and 2.8 were taken: PyTorch is seeded
with 0 once, the samplers with 1, and rungs are at 10, 40, and 160 steps. What other seeds bring is below.
"""
INITIALIZATIONS = """What Optuna prunes and samples depends on the values that it is told, hence on the initial
parameters. Over the same {count} initializations for all searches, times fewer steps, in brackets the limit that
distinct steps set, and the share of the limit that is reached. Steps are distinct where any setting before them was
another one: their parameters differ then, and nothing of one can be used for the other. Equal parts of different trials
are merged wherever they lie before the first difference, values of equal points are computed once, and trials that
differ only after they were pruned are one:
"""
PROGRAMS = """Rate, weight decay, momentum or betas, dropout, and label smoothing are changed one at a time, under
clipping, with batches of 32, 48, and 64 in random order, by two processes that start with one empty cache. Each process
needs a program for its first batch size and one for all others; what one has compiled, the other one loads. The cost of
a change is the first step with another value minus the best of five steps before it.
"""
STACKED = """A 64-64-10 network on batches of 64, plain descent, each trial with a rate of its own. Times are those
of one step of one trial on one thread, in processor time. Matmuls of all trials may sum in another order than those of
one: the last column is the largest difference from separate trials after 20 steps.
"""
TOGETHER = """`Stages(stacked=...)` trains ready stages of equal range as one program where that is measured to be
faster. Seconds of processor time of whole searches of 128 trials, the best of three after one that compiles; the last
column is the largest difference from the parameters of separate stages at the ends of 15 trials.
"""
SIMULATED = """Nothing is trained. A checkpoint takes 0.05 epochs to save or to load. The bound is the largest of d
plus the epochs after the first d of each trial, divided by the workers: these cannot start earlier. The simple bound is
the larger of the longest trial and of the work divided by the workers. No schedule reaches it where one worker trains a
stage: the grid of step decay begins with three stages of 80 epochs, of which 37 of the 40 workers have nothing.

The epochs by stages are the distinct ones, so no merging trains fewer. In the grid, all 216 trials differ from epoch
160 on: these 40 epochs of each are 8,640, a fifth of all, so not even 5 times fewer is possible, were everything before
free. The goal of 6.4 times less GPU time is that of successive halving over the same 216 trials.

*Helped*: workers without a stage of their own train stages of others with them, up to four on one, each further one at
0.9 of its speed, as data parallelism may be. Such trials equal separate ones up to rounding, not to the bit, so
`dt.run_trials` does not do this; the column tells what it would bring.
"""


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    around, rows = found["surroundings"], found["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in around["versions"].items())
    yield f"Measured {around['date']} on {around['cores']} cores of {around['processor']}; {versions}."
    yield origin(row["commit"] for row in rows.values()) + "\n"
    trained = [
        entry for name in ("late", "optuna", "residual") for entry in rows.get(name, {"searches": []})["searches"]
    ]
    yield "| search | steps alone | by stages | times fewer | seconds alone | by stages | equal |"
    yield "|---|---|---|---|---|---|---|"
    for entry in trained:
        alone = f"{entry['alone seconds']:.2f}" if "alone seconds" in entry else ""
        ratio = entry["alone"] / entry["steps"]
        least = f" ({entry['distinct']:,})" if "distinct" in entry else ""
        yield (
            f"| {entry['name']} | {entry['alone']:,} | {entry['steps']:,}{least} | {ratio:.2f} | {alone} | "
            f"{entry['seconds']:.2f} | {_yes(entry['equal'])} |"
        )
    yield from _late(rows)
    yield from _initializations([entry for entry in trained if "ratios" in entry])
    if "programs" in rows:
        yield from _programs(rows["programs"]["searches"])
    if "stacked" in rows:
        yield from _stacked(rows["stacked"]["searches"])
    if "together" in rows:
        yield from _together(rows["together"]["searches"])
    if "simulated" in rows:
        yield from _simulated(rows["simulated"]["searches"])
    if "kills" in rows:
        yield "\n## Killed processes\n"
        for entry in rows["kills"]["searches"]:
            moments = ", ".join(f"{count} while {moment!r}" for moment, count in sorted(entry["moments"].items()))
            yield (
                f"{entry['name']}, forked from one that has imported everything; the data take 10 ms a step. Values: "
                f"{'those of an undisturbed search' if entry['equal'] else 'OTHERS'}. Finished stages have "
                f"{entry['steps']:,} steps, of {entry['distinct']:,} that are needed. Killed: {moments}. "
                f"{entry['seconds']:.0f} s."
            )


def _late(rows: Mapping[str, Any]) -> Iterator[str]:
    for entry in rows.get("late", {"searches": []})["searches"]:
        ratio = entry["alone processor seconds"] / entry["processor seconds"]
        wall = entry["alone seconds"] / entry["seconds"]
        yield (
            f"\nLate drops take {wall:.2f} times less wall clock, and {ratio:.2f} times less processor time "
            f"({entry['alone processor seconds']:.2f} and {entry['processor seconds']:.2f} s), which other processes "
            "disturb less. Of the steps' ratio, the rest is saving and restoring."
        )


def _initializations(entries: list[dict[str, Any]]) -> Iterator[str]:
    if not entries:
        return
    yield "\n## Optuna, by initialization\n"
    yield INITIALIZATIONS.format(count=len(entries[0]["ratios"]))
    yield "| search | median | lowest | highest | of the limit, lowest |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        cells = [f"{of(entry['ratios']):.2f} ({of(entry['limits']):.2f})" for of in (statistics.median, min, max)]
        share = min(ratio / limit for ratio, limit in zip(entry["ratios"], entry["limits"], strict=True))
        yield f"| {entry['name']} | {' | '.join(cells)} | {share:.1%} |"


def _programs(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Programs of a search over values\n"
    yield PROGRAMS
    yield "| search | compiled | loaded | compiled for a value | cost of a change, median | worst |"
    yield "|---|---|---|---|---|---|"
    for entry in entries:
        yield (
            f"| {entry['name']} | {entry['compiled']} | {entry['loaded']} | {entry['by a value']} | "
            f"{entry['median ms']:.3f} ms | {entry['worst ms']:.2f} ms |"
        )


def _stacked(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Trials in one program\n"
    yield STACKED
    yield "| trials | µs one at a time | µs in one program | times less | largest difference of a parameter |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        one, all_ = entry["alone us"], entry["us"]
        yield f"| {entry['name']} | {one:.1f} | {all_:.1f} | {one / all_:.2f} | {entry['far']:.1e} |"


def _together(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Stages in one program\n"
    yield TOGETHER
    yield "| search | seconds, one stage at a time | together | times less | largest difference of a parameter |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        ratio = entry["one"] / entry["seconds"]
        yield f"| {entry['name']} | {entry['one']:.2f} | {entry['seconds']:.2f} | {ratio:.2f} | {entry['far']:.1e} |"


def _simulated(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Simulated: 40 workers\n"
    yield SIMULATED
    columns = ("space", "epochs alone", "by stages", "times fewer", "makespan alone", "by stages", "over the bound")
    yield f"| {' | '.join((*columns, 'over the simple bound', 'helped', 'over the simple bound'))} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for entry in entries:
        over, simple = (entry["makespan"] / entry[name] - 1 for name in ("bound", "simple bound"))
        yield (
            f"| {entry['name']} | {entry['alone']:,} | {entry['steps']:,} | {entry['alone'] / entry['steps']:.2f} | "
            f"{entry['alone makespan']:.0f} | {entry['makespan']:.0f} | {over:.1%} | {simple:.1%} | "
            f"{entry['helped makespan']:.0f} | {entry['helped makespan'] / entry['simple bound'] - 1:.1%} |"
        )


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
