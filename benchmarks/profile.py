"""Where the time of a training step goes, for the page of `benchmarks.train`: `python -m benchmarks.profile [NETWORK]`.

Each launch of the compiled step is timed while the step runs. Launches of the same library call or of kernels with the
same operators count together, in the forward pass, the backward pass and the update apart. The longest stay; the rest
is one line. Figures are written after each network, to `benchmarks/results/profile.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.train import ROOT, surroundings
from daceml_train.reporting.model import Launched, grouped

RESULTS = ROOT / "benchmarks" / "results" / "profile.json"
LINES = 8
"""Groups of launches that a network's profile shows."""
ROUNDS = 7
"""Steps of which each launch's median counts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each network in a process of its own and write the figures."""
    from benchmarks.networks import NETWORKS, TWELVE

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: twelve)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--here", action="store_true", help="one network, in this process, to standard output")
    options = parser.parse_args(arguments)
    for name in options.networks:
        if name not in NETWORKS:
            parser.error(f"no network is called {name!r}; known: {', '.join(NETWORKS)}")
    if options.here:
        print(json.dumps(profile(options.networks[0])))
        return 0
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {"networks": {}}
    for name in options.networks or TWELVE:
        command = [sys.executable, "-m", "benchmarks.profile", "--here", name]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            print(f"{name}: {ended.stderr[-2000:].strip()}", file=sys.stderr)
            return 1
        found = json.loads(ended.stdout.splitlines()[-1])
        results["networks"][name] = found
        results |= surroundings()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {found['ms']:.1f} ms in {found['launches']} launches", *lines(found), sep="\n")
    return 0


def profile(name: str) -> dict[str, Any]:
    """The launches of a network's step in groups, the longest first, and what is left."""
    import daceml_train as dt
    from benchmarks.networks import NETWORKS
    from benchmarks.variants import OwnStep
    from benchmarks.visit import stay

    step = OwnStep(NETWORKS[name].build())
    step()
    stay(step)
    report = dt.report(step.compiled, step, runs=ROUNDS)
    return summary([launch for function in report.functions for launch in function.launches])


def summary(launches: Sequence[Launched]) -> dict[str, Any]:
    """Launches by what they run and in which phase."""

    def key(launch: Launched) -> str:
        return f"{launch.phase} {launch.kernel if launch.kind == 'call' else launch.operators or launch.kind}"

    groups = sorted(grouped(launches, key), key=lambda group: -(group.seconds or 0.0))
    milliseconds = [1e3 * (group.seconds or 0.0) for group in groups]
    shown = []
    for group, ms in list(zip(groups, milliseconds, strict=True))[:LINES]:
        phase, what = group.name.split(" ", 1)
        sizes = {"flops": group.flops, "bytes": group.bytes}
        shown.append({"what": what, "phase": phase, "count": group.count, "ms": ms} | sizes)
    rest = {"count": sum(group.count for group in groups[LINES:]), "ms": sum(milliseconds[LINES:])}
    return {"ms": sum(milliseconds), "launches": len(launches), "groups": shown, "rest": rest}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The table of one network in Markdown."""
    results = ["| launches | | phase | ms | share | GF/s | GB/s |", "|---|---|---|---|---|---|---|"]
    for group in found["groups"]:
        seconds, what = group["ms"] / 1e3, group["what"].removeprefix("aten::")
        shown = what if len(what) <= 48 else f"{what[:45]}..."
        cells = (
            str(group["count"]),
            f"`{shown}`",
            group["phase"],
            f"{group['ms']:.1f}",
            f"{group['ms'] / found['ms']:.0%}",
            f"{group['flops'] / seconds / 1e9:.0f}",
            f"{group['bytes'] / seconds / 1e9:.0f}",
        )
        results.append(f"| {' | '.join(cells)} |")
    rest = found["rest"]
    results.append(f"| {rest['count']} | the rest | | {rest['ms']:.1f} | {rest['ms'] / found['ms']:.0%} | | |")
    return results


if __name__ == "__main__":
    sys.exit(main())
