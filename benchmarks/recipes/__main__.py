"""Training recipes through the compiler: `python -m benchmarks.recipes [NAME ...] [--update] [--json FILE]`.

Each recipe trains about five steps in eager execution, through `optimize` and through `training_step`. Losses,
parameters, buffers, gradients, the optimizer's state, learning rates and flags must be the same. Models are float64, so
that rounding is far below any defect. Without names all of them run, and the results go to `benchmarks/results/` and
into `docs/results/recipes.md`. Exits with 1 where one is wrong: a value differs, an error is raised that eager
execution does not raise, or something falls back to PyTorch because of an internal error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import commit, origin
from benchmarks.recipes import loops, optimizers, user_optimizers
from benchmarks.recipes.way import WAYS, Way
from daceml_train.errors import INTERNAL, Invalid

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "recipes.json", ROOT / "docs" / "results" / "recipes.md"
MARKS = "<!-- figures: begin -->", "<!-- figures: end -->"
_INSTALLED = re.compile(r"/\S*/site-packages/")
"""Where packages are on this machine, in a reason that names a file of theirs."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""In units of the largest element: rounding of five steps in another order of additions. Gradients below the floor are
zero but for rounding (of a bias before a batch normalization)."""
FLOOR = 1e-2
BFLOAT16 = 4 * 2.0**-8
"""Where autocast rounds to bfloat16, fused kernels round less often than operators one by one."""


@dataclasses.dataclass
class Row:
    """What came of a recipe in one way: `kind` is same, fallback, refused or wrong; `said` says why."""

    recipe: str
    way: str
    kind: str
    said: str = ""
    commit: str = ""


def differs(name: str, found: Any, expected: Any, loose: bool, narrow: bool = False) -> str:
    """How two recorded values differ; nothing if they do not."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        same = type(found) is type(expected) and (found == expected or _near(found, expected, loose))
        return "" if same else f"{name}: {found} instead of {expected}"
    if (found.dtype, found.shape, found.layout) != (expected.dtype, expected.shape, expected.layout):
        return f"{name}: {found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    a, b = found.detach().to_dense(), expected.detach().to_dense()
    if not a.is_floating_point():
        return "" if torch.equal(a, b) else f"{name}: {int((a != b).sum())} elements differ"
    allowed = BFLOAT16 if loose else TOLERANCES[torch.float32 if narrow else a.dtype]
    error = float((a - b).abs().max()) / max(float(b.abs().max()), FLOOR) if a.numel() else 0.0
    return "" if error <= allowed else f"{name} is off by {error:.1e} of its largest element"


def _near(found: Any, expected: Any, loose: bool) -> bool:
    if not isinstance(found, float):
        return False
    return abs(found - expected) <= (BFLOAT16 if loose else 1e-4) * max(abs(expected), FLOOR)


def run(name: str, recipe: Callable[[Way], None], kinds: Sequence[str] = WAYS[1:]) -> list[Row]:
    """The rows of one recipe."""
    rows, eager = [], Way("eager")
    torch._dynamo.reset()
    torch.manual_seed(0)
    raised = _tried(recipe, eager)
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        way = Way(kind)
        error = _tried(recipe, way)
        rows.append(Row(name, kind, *_compared(name, way, eager, error, raised), commit()))
    return rows


def _tried(recipe: Callable[[Way], None], way: Way) -> Exception | None:
    try:
        with way.counting():
            recipe(way)
    except Exception as error:  # each is a finding
        return error
    return None


def _compared(name: str, way: Way, eager: Way, error: Exception | None, raised: Exception | None) -> tuple[str, str]:
    if raised is not None:
        return "wrong", f"the recipe itself raises {type(raised).__name__}: {raised}"
    if isinstance(error, Invalid) and not way.seen:
        return "refused", str(error)
    if error is not None:
        return "wrong", f"raises {type(error).__name__}: {error}"
    if way.seen.keys() != eager.seen.keys():
        return "wrong", f"records {sorted(way.seen.keys() ^ eager.seen.keys())[:3]} in one way alone"
    loose = "bfloat16" in name
    narrow = "float32" in name
    found = (differs(key, value, eager.seen[key], loose, narrow) for key, value in way.seen.items())
    if message := next(filter(None, found), ""):
        return "wrong", message
    reasons = [_INSTALLED.sub("", " ".join(reason.split())) for reason in way.reasons()]
    kind = "wrong" if any(r.startswith(INTERNAL) for r in reasons) else "fallback" if reasons else "same"
    return kind, "; ".join(reasons)


def write(rows: Sequence[Row]) -> None:
    """Write the results and the table of the documentation."""
    RESULTS.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{page(rows)}\n{MARKS[1]}{after}")


def page(rows: Sequence[Row]) -> str:
    """The part of the documentation that a complete run writes."""
    counts = Counter(row.kind for row in rows)
    names = list(dict.fromkeys(row.recipe for row in rows))
    lines = [f"{len(names)} recipes in two ways, PyTorch {torch.__version__}: {counts['same']} the same and compiled,"]
    lines += [f"{counts['fallback']} the same with a fallback, {counts['refused']} refused, {counts['wrong']} wrong."]
    lines += [origin((row.commit for row in rows), "runs")]
    lines += [""]
    lines += ["| recipe | " + " | ".join(WAYS[1:]) + " |", "|---|---|---|"]
    kinds = {(row.recipe, row.way): row.kind for row in rows}
    lines += [f"| {name} | {' | '.join(kinds.get((name, way), '') for way in WAYS[1:])} |" for name in names]
    messages: dict[str, list[str]] = {}
    for row in rows:
        if row.said:
            messages.setdefault(f"{row.kind}, {row.way}: {row.said[:300]}", []).append(row.recipe)
    return "\n".join([*lines, "", *(f"- {reason} ({', '.join(where)})" for reason, where in messages.items())])


def main() -> int:
    """Run; 1 if a recipe is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--json", type=Path, help="a file for the rows, written after each recipe")
    parser.add_argument("--update", action="store_true", help="rows of the recipes named replace the stored ones")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, recipe in (*optimizers.recipes(), *user_optimizers.recipes(), *loops.recipes()):
        if options.names and not any(part in name for part in options.names):
            continue
        rows += (results := run(name, recipe))
        print(f"{name}: {', '.join(f'{row.way} {row.kind}' for row in results)}", flush=True)
        for row in results:
            if row.said:
                print(f"    {row.way}: {row.said[:400]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    print(dict(Counter(row.kind for row in rows)))
    if options.update:
        done = {row.recipe for row in rows}
        stored = [Row(**row) for row in json.loads(RESULTS.read_text())]
        known = {name for name, _ in (*optimizers.recipes(), *user_optimizers.recipes(), *loops.recipes())}
        rows += [row for row in stored if row.recipe not in done and row.recipe in known]
    if options.update or not options.names:
        write(sorted(rows, key=lambda row: row.recipe))
    return int(any(row.kind == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
