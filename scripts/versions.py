"""`make test-versions`: the tests under each admitted Python and PyTorch, in environments of their own in `.venvs/`.

    make test-versions                                  # every pair that installs; the tests in QUICK
    make test-versions ARGS="--only 3.12 tests/driver"  # pairs with this in their name; other tests
    make test-versions ARGS="--all"                     # the whole suite under each

PyTorch comes from its CPU index if that answers, else from pip's default index, as in `make setup`; TORCH_INDEX names
another one. Exits with 1 where a test fails, and says which pairs did not install.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setup import CPU_INDEX, ROOT, answers

PAIRS = (("3.11", "2.11"), ("3.11", "2.12"), ("3.11", "2.13"), ("3.12", "2.11"), ("3.12", "2.12"), ("3.12", "2.13"))
"""(Python, PyTorch): what `pyproject.toml` admits."""
QUICK = (
    "tests/frontends/torch",
    "tests/autodiff",
    "tests/driver/test_module.py",
    "tests/driver/test_step.py",
    "tests/driver/test_optimizers.py",
    "tests/driver/test_shapes.py",
    "tests/driver/test_features.py",
    "tests/runtime",
)
"""The tests that meet PyTorch's internals: capture, compiled modules and steps, the native executor."""


def environment(python: str, torch: str) -> Path | None:
    """The Python of an environment with what the project needs; None if it does not install."""
    interpreter = shutil.which(f"python{python}")
    if interpreter is None or subprocess.run([interpreter, "-c", ""], check=False, capture_output=True).returncode:
        say(f"there is no python{python}")
        return None
    folder = ROOT / ".venvs" / f"python{python}-torch{torch}"
    found, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return found
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX") or (CPU_INDEX if answers(f"{CPU_INDEX}/torch/") else "")
    say(f"installing PyTorch {torch} for Python {python} from {index or 'the default index'}")
    commands = [
        [interpreter, "-m", "venv", str(folder)],
        [*pip, f"torch=={torch}.*", *(["--index-url", index] if index else [])],
        [*pip, f"torch=={torch}.*", *needed()],
        [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
    ]
    for command in commands:
        if subprocess.call(command):
            return None
    done.touch()
    return found


def needed() -> list[str]:
    """What the project requires besides PyTorch, with what its tests require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *extras["dev"], *extras["notebook"], *extras["demo"]]
    return [line for line in every if not line.startswith("torch>")]


def say(line: str) -> None:
    """One line of progress."""
    print(f"[versions] {line}", flush=True)


def main() -> int:
    """Test every pair; 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="arguments for pytest; default: the tests in QUICK")
    parser.add_argument("--only", default="", metavar="PART", help="pairs with this in their name, as 3.12-2.11")
    parser.add_argument("--all", action="store_true", help="the whole suite")
    options, further = parser.parse_known_args()
    tests = [] if options.all else options.tests or list(QUICK)
    results: dict[str, str] = {}
    for python, torch in PAIRS:
        name = f"{python}-{torch}"
        if options.only not in name:
            continue
        found = environment(python, torch)
        if found is None:
            results[name] = "does not install here"
            continue
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [str(found), "-m", "pytest", "-q", *tests, *further]
        code = subprocess.call(command, cwd=ROOT, env={**os.environ, **paths})
        results[name] = "passes" if code == 0 else f"fails ({code})"
    for name, result in results.items():
        say(f"Python {name.replace('-', ', PyTorch ')}: {result}")
    return int(any(result.startswith("fails") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
