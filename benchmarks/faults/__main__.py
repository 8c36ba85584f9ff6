"""Train through faults: `make faults`. Nothing may be wrong, hang or be left, and the next run must be right.

python -m benchmarks.faults [--kills 200] [--minutes 60] [--seed 0] [--only NAME] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.kills import sweep
from benchmarks.faults.scenarios import SCENARIOS, run
from benchmarks.provenance import commit

RESULTS = Path(__file__).parents[1] / "results" / "faults.json"


def main() -> None:
    """Run the sweep; the exit status is 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="scenarios whose name contains this, or `kills`")
    parser.add_argument("--minutes", type=float, default=600, help="after which no further kill begins")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.name} in benchmarks/results for a full run")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before any fork: a child of a process with a pool of threads may wait for one for ever
    import daceml_train.driver
    import daceml_train.sdfg.convert  # noqa: F401  both so that children need not import them
    from daceml_train.runtime.native_build import executor

    found: dict[str, Any] = {"commit": commit(), "scenarios": {}}
    with tempfile.TemporaryDirectory(prefix="daceml_train-faults-") as name:
        folder = Path(name)
        native = folder / "native"
        native.mkdir()
        shutil.copy2(executor(), native)  # from the user's cache: its compilation takes half a minute
        for place in ("cache", "sound"):
            shutil.copytree(native, folder / place / "native")
            (folder / place).chmod(0o700)
        for scenario in SCENARIOS:
            if options.only is None or options.only in scenario:
                found["scenarios"][scenario] = told = run(scenario, folder, native)
                say(f"{scenario}: {'well' if well(told) else json.dumps(told)}")
        if options.only in (None, "kills"):
            found["kills"] = sweep(options.kills, options.minutes, options.seed, folder, say)
            say(json.dumps(found["kills"]))
    found["well"] = all(well(told) for told in [*found["scenarios"].values(), found.get("kills", {})])
    results = options.results or (RESULTS if options.only is None else None)
    if results:
        results.write_text(json.dumps(without(found, name), indent=1) + "\n")
    sys.exit(0 if found["well"] else 1)


def well(told: dict[str, Any]) -> bool:
    """Whether nothing was wrong, hung, failed or was left."""
    bad = any(told.get(key) for key in ("wrong", "hangs", "failed", "left"))
    return not bad and told.get("next run right", True) is True


def without(told: Any, folder: str) -> Any:
    """The same without the path of the folder that the run had for itself, which says nothing of another machine."""
    if isinstance(told, str):
        return told.replace(folder, "FOLDER")
    if isinstance(told, dict):
        return {key: without(value, folder) for key, value in told.items()}
    return [without(value, folder) for value in told] if isinstance(told, list) else told


def say(line: str) -> None:
    """One line of progress."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
