"""The page and the picture of what `benchmarks.train` measured: `python -m benchmarks.render`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from statistics import geometric_mean
from typing import Any

from benchmarks import levers, profile
from benchmarks.train import ROOT, best
from benchmarks.variants import VARIANTS
from daceml_train.reporting import bytes_text

RESULTS = ROOT / "benchmarks" / "results" / "train.json"
PAGE = ROOT / "docs" / "results" / "performance.md"
FLOORED = "Intel(R) Xeon(R) Processor"
"""The processor whose floor is estimated."""
FLOOR = {
    "resnet50": 1.30,
    "wide_resnet50_2": 1.58,
    "mobilenet_v2": 1.66,
    "efficientnet_b0": 1.7,
    "fcn8s": 1.44,
    "mixer": 1.30,
    "vit_s": 1.22,
    "bert": 1.44,
    "gpt2": 1.41,
    "wavenet": 1.69,
    "dlrm": 1.49,
    "lstm": 1.55,
}
"""How many times as fast as PyTorch's best variant a step can be on two cores with AVX-512: heavy operators at the best
rate of any library, everything else at the memory's bandwidth with each byte moved once."""
HEAD = """# Performance

Generated; do not edit. To measure again:

    make bench                                            # all: more than an hour on two cores
    .venv/bin/python -m benchmarks.train gpt2 --update    # one network

A figure is the time of one full training step: forward pass, loss, backward pass, and update. Before anything is
timed, loss, gradients, buffers, and updated parameters are compared with those of eager execution, against float64.
Each variant runs in its own process. The variants alternate, with a learning rate of zero, because a batch that is
memorized has subnormal gradients. Visits during which other processes used more than a tenth of a core do not count;
* marks rows with too few remaining visits, where the quieter half is used. *Tuned* means that glibc keeps memory
instead of returning it and requests huge pages, which most users do not set. Ratios divide PyTorch's time by ours:
above 1 is faster than PyTorch. The best of PyTorch's variants counts, with the fused optimizer and, for images,
channels-last. The floor is an estimate of what this processor allows. Cold is the extra time of a first step in a
fresh process with empty caches, without the native executor, which is compiled once per PyTorch version. Warm is the
same with filled caches. Peak memory is that of a warm process; rows that were measured without warm starts
(`--no-starts`) have none. Each processor has a table of its own, since ratios
depend on it. Rows stay until they are measured again; the date is that of the newest row."""
Networks = Mapping[str, Mapping[str, Any]]


def main() -> None:
    """Write page and picture."""
    write(json.loads(RESULTS.read_text(encoding="utf-8")))


def write(results: dict[str, Any]) -> None:
    """The page, and the picture beside it."""
    from benchmarks.figures import ratios

    PAGE.write_text("\n".join(page(results)) + "\n", encoding="utf-8")
    processor = _drawn(results)
    networks, cores = results[processor]["networks"], results[processor]["cores"]
    if drawn := {name: chosen for name, found in networks.items() if (chosen := _ratios(found))}:
        ratios(drawn, PAGE.with_suffix(".png"), f"{cores} cores of {processor}")


def _drawn(results: Mapping[str, Any]) -> str:
    """The processor of the picture: the one with most networks, and of several the newest."""
    return max(
        _newest_first(results), key=lambda pair: sum(bool(_ratios(row)) for row in pair[1]["networks"].values())
    )[0]


def _newest_first(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(results.items(), key=lambda pair: pair[1]["date"], reverse=True)


def page(results: dict[str, Any]) -> Iterator[str]:
    """The page line by line: what each processor has, then networks one by one."""
    yield HEAD
    drawn = _drawn(results)
    for processor, found in _newest_first(results):
        yield f"\n## {processor}\n"
        versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
        yield f"Measured {found['date']} on {found['cores']} cores of {processor}; {versions}.\n"
        dates = {row["date"] for row in found["networks"].values() if "date" in row}
        if len(dates) > 1:
            yield f"Each row is of one run; the first of them ended at {min(dates)}.\n"
        measured = {name: row for name, row in found["networks"].items() if _ratios(row)}
        floor = FLOOR if processor.startswith(FLOORED) else {}
        if measured:
            yield from _summary(measured, floor)
            picture = "\n![How many times as fast as the best of PyTorch](performance.png)\n"
            yield picture if processor == drawn else ""
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---" * len(COLUMNS) + "|"
        for name, row in found["networks"].items():
            yield f"| {' | '.join(_cells(name, row, floor))} |"
        yield from _mixed(found["networks"])
    yield from levers.page()
    yield from _networks(results)


def _networks(results: Mapping[str, Any]) -> Iterator[str]:
    """A section per network: of the processor of the picture, or else of the one that measured it last."""
    profiles = json.loads(profile.RESULTS.read_text(encoding="utf-8")) if profile.RESULTS.exists() else {"networks": {}}
    shown: set[str] = set()
    for processor, found in sorted(_newest_first(results), key=lambda pair: pair[0] != _drawn(results)):
        for name, row in found["networks"].items():
            if name in shown:
                continue
            shown.add(name)
            yield from _section(row, processor)
            same = processor.startswith(str(profiles.get("processor")))
            if same and (where := profiles["networks"].get(name)):
                yield f"\nWhere the time goes, {where['ms']:.0f} ms in all (`python -m benchmarks.profile {name}`):\n"
                yield from profile.lines(where)
            if processor.startswith(FLOORED) and (message := levers.LIMITS.get(name)):
                yield f"\n{message}"


# ---- one line per network -------------------------------------------------------------------------------------------
COLUMNS = (
    "network",
    "best PyTorch",
    "ms",
    "tuned ms",
    "training_step ms",
    "× stock",
    "× tuned",
    "of the floor's ratio",
    "optimize × stock",
    "peak memory ÷",
    "cold s",
    "torch.compile s",
    "warm s",
)


def _ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast as PyTorch: the step with both settings of memory allocation, and `optimize`."""
    if "error" in found or "step" not in found["variants"] or (stock := best(found)) is None:
        return {}
    rows, results = found["variants"], {}
    results["step"] = stock[1] / rows["step"]["stock"]["median"]
    if tuned := best(found, "tuned"):
        results["tuned"] = tuned[1] / rows["step"]["stock"]["median"]
    if "module" in rows:
        results["module"] = stock[1] / rows["module"]["stock"]["median"]
    return results


def _starts(found: Mapping[str, Any]) -> dict[str, float]:
    """Peak memory relative to PyTorch's best variant, seconds of cold and warm starts, torch.compile's cold start."""
    rows, fastest = found["variants"], best(found)
    results = {"cold": rows["step"]["cold"]["seconds"]}
    if warm := rows["step"].get("warm"):
        results["warm"] = warm["seconds"]
        results["warm after capture"] = sum(seconds for stage, seconds in warm["stages"].items() if stage != "capture")
        if fastest and "warm" in rows[fastest[0]]:
            results["memory"] = warm["peak_bytes"] / rows[fastest[0]]["warm"]["peak_bytes"]
    if "inductor" in rows:
        results["inductor"] = rows["inductor"]["cold"]["seconds"]
    return results


def _cells(name: str, found: Mapping[str, Any], floors: Mapping[str, float]) -> list[str]:
    title = found["title"].split(",")[0]
    if not (chosen := _ratios(found)):
        return [title, "not measured", *[""] * (len(COLUMNS) - 2)]
    stock, tuned, starts = best(found), best(found, "tuned"), _starts(found)
    assert stock is not None

    def text(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    floor = floors.get(name)
    return [
        title,
        stock[0],
        text(stock[1], 1),
        text(tuned[1], 1) if tuned else "",
        text(found["variants"]["step"]["stock"]["median"], 1),
        f"**{text(chosen['step'])}**",
        text(chosen.get("tuned")),
        f"{100 * chosen['step'] / floor:.0f} %" if floor else "",
        text(chosen.get("module")),
        text(starts.get("memory")),
        text(starts["cold"], 1),
        text(starts.get("inductor"), 1),
        text(starts.get("warm"), 1),
    ]


# ---- mixed precision ------------------------------------------------------------------------------------------------
def _mixed_ratio(found: Mapping[str, Any]) -> float | None:
    """How many times as fast as the best of PyTorch under autocast."""
    theirs, ours = best(found, mixed=True) if "variants" in found else None, found.get("variants", {}).get("step-bf16")
    return theirs[1] / ours["stock"]["median"] if theirs and ours else None


def _mixed(networks: Networks) -> Iterator[str]:
    """A line per network in bfloat16 and float32."""
    ratios = {name: ratio for name, found in networks.items() if (ratio := _mixed_ratio(found))}
    if not ratios:
        return
    yield "\n## Mixed precision\n"
    yield "`training_step` with `pipeline=dt.MIXED_PRECISION` against PyTorch's best variant under `torch.autocast` in"
    yield "bfloat16. *Error* is the error of our gradients as a share of the tolerance, 1.5 times autocast's.\n"
    yield "| network | best under autocast | ms | training_step, bf16 ms | × | float32 ms | error |"
    yield "|---|---|---|---|---|---|---|"
    for name, ratio in ratios.items():
        found = networks[name]
        theirs, rows = best(found, mixed=True), found["variants"]
        assert theirs is not None
        ours, plain = rows["step-bf16"]["stock"]["median"], rows.get("step")
        cells = (
            found["title"].split(",")[0],
            theirs[0],
            f"{theirs[1]:.1f}",
            f"{ours:.1f}",
            f"**{ratio:.2f}**",
            f"{plain['stock']['median']:.1f}" if plain else "",
            f"{found.get('mixed_agreement', float('nan')):.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def _summary(networks: Networks, floor: Mapping[str, float]) -> Iterator[str]:
    """Geometric means and extremes beside what they should be."""
    chosen = {name: _ratios(found) for name, found in networks.items()}
    starts = {name: _starts(found) for name, found in networks.items()}

    def mean(of: Mapping[str, Mapping[str, float]], key: str) -> str:
        values = [row[key] for row in of.values() if key in row]
        return f"{geometric_mean(values):.2f}" if values else ""

    def extreme(values: Mapping[str, float], pick: Any) -> str:
        if not values:
            return ""
        at = pick(values, key=values.__getitem__)
        return f"{values[at]:.2f} ({at})"

    cold = {name: row["cold"] / row["inductor"] for name, row in starts.items() if row.get("inductor")}
    mixed = [ratio for found in networks.values() if (ratio := _mixed_ratio(found))]
    shares = {name: row["step"] / floor[name] for name, row in chosen.items() if name in floor}
    rows = [
        ("`training_step`, times as fast as the best of PyTorch, geometric mean", "1.5", mean(chosen, "step")),
        ("the same, PyTorch with tuned memory allocation", "1.35", mean(chosen, "tuned")),
        ("the same on the worst network", "1.15", extreme({n: row["step"] for n, row in chosen.items()}, min)),
        ("share of the floor's ratio, worst network", "0.88", extreme(shares, min)),
        ("`optimize` with PyTorch's optimizer, geometric mean", "1.2", mean(chosen, "module")),
        (
            "bfloat16: `training_step` against the best under autocast, geometric mean",
            "2",
            f"{geometric_mean(mixed):.2f}" if mixed else "",
        ),
        ("peak memory ÷ PyTorch's, geometric mean", "0.78", mean(starts, "memory")),
        ("the same, worst network", "0.8", extreme({n: r["memory"] for n, r in starts.items() if "memory" in r}, max)),
        ("cold start ÷ torch.compile's, worst network", "0.25", extreme(cold, max)),
        (
            "seconds of a warm start after capture, worst network",
            "1",
            extreme({n: r["warm after capture"] for n, r in starts.items() if "warm" in r}, max),
        ),
    ]
    yield f"{len(networks)} networks, float32:\n"
    yield "| what | goal | measured |"
    yield "|---|---|---|"
    for what, goal, measured in rows:
        if not measured:
            continue
        yield f"| {what} | {goal} | {measured} |"


# ---- one section per network ----------------------------------------------------------------------------------------
def _section(found: Mapping[str, Any], processor: str) -> Iterator[str]:
    yield f"\n## {found['title']}\n"
    yield f"{processor}.\n"
    if "error" in found:
        yield f"Not measured: {found['error'].splitlines()[-1]}"
        return
    yield "| variant | ms a step | quartiles | best ÷ it | tuned ms | page faults | peak memory | cold s | warm s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, row in found["variants"].items():
        stock, tuned, fastest = row["stock"], row.get("tuned"), best(found, mixed=VARIANTS[name].mixed)
        cells = (
            VARIANTS[name].title,
            f"{stock['median']:.2f}{' *' if stock['disturbed'] else ''}",
            f"{stock['lower']:.2f}-{stock['upper']:.2f}",
            f"{fastest[1] / stock['median']:.2f}" if fastest else "",
            f"{tuned['median']:.2f}{' *' if tuned['disturbed'] else ''}" if tuned else "",
            f"{stock['faults']:.0f}",
            bytes_text(row["warm"]["peak_bytes"]) if "warm" in row else "",
            f"{row['cold']['seconds']:.1f}",
            f"{row['warm']['seconds']:.1f}" if "warm" in row else "",
        )
        yield f"| {' | '.join(cells)} |"
    yield from _compilation(found["variants"].get("step", {}))


def _compilation(row: dict[str, Any]) -> Iterator[str]:
    """Bytes per level and seconds per stage of the whole step."""
    for function in row.get("report", {}).get("functions", ())[:1]:
        levels = ", ".join(f"{bytes_text(v['after'])} after {v['name'].replace('_', ' ')}" for v in function["levels"])
        yield f"\nBytes that a step moves: {bytes_text(function['captured'])} as captured, {levels}. "
        yield f"{function['kernels']} kernels ({function['distinct_kernels']} distinct) and "
        yield f"{sum(function['calls'].values())} library calls."
    for kind in ("cold", "warm"):
        if stages := row.get(kind, {}).get("stages"):
            yield f"\n{kind.capitalize()} start: {', '.join(f'{name} {s:.1f} s' for name, s in stages.items())}."


if __name__ == "__main__":
    sys.exit(main())
