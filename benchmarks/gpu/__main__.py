"""`make bench-gpu`: tables of a CUDA device, into gpu_results/results.json, results.md and a picture.

--only kernels networks small streams bytes    parts of it
--modes default reduce-overhead max-autotune   of torch.compile
--minutes 7.5                                  nothing new is begun after that; the next call goes on
--again                                        measure anew what is there
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PARTS = ("kernels", "networks", "small", "streams", "bytes")


def main() -> int:
    """Measure what is not there yet, and write what is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--modes", nargs="*", default=["default", "reduce-overhead"])
    parser.add_argument("--precisions", nargs="*", choices=("bf16", "tf32"), default=["bf16", "tf32"])
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--folder", type=Path, default=Path("gpu_results"))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        return 3
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "results.json"
    results = json.loads(path.read_text()) if path.exists() and not options.again else {}
    results["machine"] = machine()
    end = time.monotonic() + 60 * options.minutes
    left = 0
    for key, measure in jobs(options):
        if key in results.setdefault("rows", {}):
            continue
        if time.monotonic() > end:
            left += 1
            continue
        try:
            results["rows"][key] = measure()
        except Exception as error:
            results["rows"][key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        print(key, json.dumps(results["rows"][key])[:400], flush=True)
        path.write_text(json.dumps(results, indent=1))
    text = page(results)
    (options.folder / "results.md").write_text(text)
    print(text)
    picture(results, options.folder / "results.png")
    print(f"{left} left for the next call" if left else "all measured", f"; results are in {options.folder}")
    return 0


def machine() -> dict[str, Any]:
    """What was measured on, and when."""
    found = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": found.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What there is to measure, by name."""
    from benchmarks.gpu import clock, dram, kernels, networks

    modes = tuple(options.modes)
    yield "copy bandwidth", clock.copy_bandwidth
    if "small" in options.only:
        for name, network in networks.SMALL.items():
            yield f"small {name}", lambda n=name, w=network: _row(networks.row(n, w, "tf32", modes))  # type: ignore[misc]
    if "streams" in options.only:
        yield "streams", lambda: streams(networks)
    if "kernels" in options.only:
        yield "kernels", lambda: [_row(r) for r in kernels.rows()]
    if "networks" in options.only:
        for precision in options.precisions:
            for name, network in networks.LARGE.items():
                key = f"network {name} {precision} {' '.join(modes)}"
                yield key, lambda n=name, w=network, p=precision: _row(networks.row(n, w, p, modes))  # type: ignore[misc]
    if "bytes" in options.only:
        yield "bytes", lambda: [_row(r) for r in dram.rows()]


def _row(made: Any) -> dict[str, Any]:
    return dataclasses.asdict(made)


def streams(networks: Any) -> dict[str, Any]:
    """The branchy network recorded on several streams, and on one."""
    from daceml_train.runtime import recording, streams

    (name, network), *_ = networks.BRANCHY.items()
    several = networks.row(name, network, "tf32", ())
    chosen = recording.schedule_of
    recording.schedule_of = lambda plan, capability: streams.one_stream(len(plan.program.launches))
    try:
        one = networks.row(name, network, "tf32", ())
    finally:
        recording.schedule_of = chosen
    return {"several": _row(several), "one": _row(one)}


def page(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    facts, rows = results["machine"], results.get("rows", {})
    lines = [f"# {facts['device']}, {facts['date']}", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    roof = rows.get("copy bandwidth")
    if isinstance(roof, float):
        lines += [f"A copy on the device moves {roof / 1e12:.2f} TB/s.", ""]
        found = rows.get("kernels")
        if isinstance(found, list):
            lines += [
                "| kernel | | | µs | of the copy | over eager | over torch.compile |",
                "|---|---|---|---|---|---|---|",
            ]
            for r in found:
                share = r["bytes"] / (r["ours"] * 1e-6) / roof
                times = (
                    f"{r['ours']:.0f} | {share:.0%} | {r['eager'] / r['ours']:.2f} | {r['compiled'] / r['ours']:.2f}"
                )
                lines.append(f"| {r['name']} | {r['dtype']} | {r['direction']} | {times} |")
            lines.append("")
    lines += ["| step | | ours, ms | over eager | over torch.compile | peak of torch.compile's | launches | |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    over_eager, over_compiled = [], []
    for key, r in rows.items():
        if not isinstance(r, dict) or "milliseconds" not in r or "ours" not in r["milliseconds"]:
            if isinstance(r, dict) and ("error" in r or "notes" in r):
                lines.append(f"| {key} | | | | | | | {r.get('error') or '; '.join(r['notes'])} |")
            continue
        times, own = r["milliseconds"], r["milliseconds"]["ours"]
        eager = min((t for n, t in times.items() if n.startswith("eager")), default=math.nan)
        compiled = min((t for n, t in times.items() if n.startswith("compile")), default=math.nan)
        peaks = [p for n, p in r["peak"].items() if n.startswith("compile")]
        peak = f"{r['peak']['ours'] / min(peaks):.2f}" if peaks else ""
        if key.startswith("network"):
            over_eager.append(eager / own)
            over_compiled.append(compiled / own)
        ratios = f"{eager / own:.2f} | {compiled / own:.2f} | {peak} | {r['launches']}"
        lines.append(f"| {r['network']} | {r['precision']} | {own:.2f} | {ratios} | {'; '.join(r['notes'])} |")
    if over_eager:
        lines += ["", f"Networks, geometric mean: {_mean(over_eager):.2f} over eager, "
                  f"{_mean(over_compiled):.2f} over the best of torch.compile."]  # fmt: skip
    found = rows.get("streams")
    if isinstance(found, dict) and "one" in found:
        one, several = (found[k]["milliseconds"].get("ours", math.nan) for k in ("one", "several"))
        lines += ["", f"Branches: {found['several']['streams']} streams, {one / several:.2f} times as fast as one."]
    found = rows.get("bytes")
    if isinstance(found, list) and found:
        lines += ["", "| kernel | bytes by the model | by ncu |", "|---|---|---|"]
        lines += [f"| {r['name']} | {r['modelled']:,} | {r['measured'] / r['modelled']:.2f} of it |" for r in found]
    return "\n".join(lines) + "\n"


def _mean(ratios: list[float]) -> float:
    known = [r for r in ratios if r == r]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan


def picture(results: dict[str, Any], path: Path) -> None:
    """Speed-ups as bars, where matplotlib is there."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = [r for r in results.get("rows", {}).values() if isinstance(r, dict) and "ours" in r.get("milliseconds", {})]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1))
    for position, r in enumerate(rows):
        times, own = r["milliseconds"], r["milliseconds"]["ours"]
        for offset, start in ((-0.2, "eager"), (0.2, "compile")):
            best = min((t for n, t in times.items() if n.startswith(start)), default=math.nan)
            axes.barh(position + offset, best / own, 0.38, color="C0" if start == "eager" else "C1")
    axes.set_yticks(range(len(rows)), [f"{r['network']} {r['precision']}" for r in rows])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as eager (blue) and as the best of torch.compile (orange)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
