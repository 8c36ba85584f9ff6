"""`make gpu-bundle`, `make test-gpu`, `make bench-gpu`: carry the project to a machine with a GPU, test and measure it.

    python scripts/gpu.py bundle [--folder gpu_bundle]   with a network: wheels that PyTorch does not include
    python scripts/gpu.py test | bench [arguments]       on the machine with the GPU; needs no network

The last two run under the calling Python, which has PyTorch; missing packages are installed from the bundle into a
folder beside it, and nothing else is changed. Without a CUDA device they say so and exit with code 3.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_DEVICE = 3
WANTED = ("dace>=2.0.0b1,<2.1", "rich>=13.7,<16", "pytest>=8.3,<10", "expecttest>=0.3,<0.4", "pytest-xdist>=3.6,<4")
"""What tests and measurements need beside PyTorch, NumPy, SciPy and SymPy."""
SECONDS, WORKERS = 470, 6
"""The time limit of the tests, and the number of parallel tests: they mostly compile."""
NOT_CARRIED = {"torch", "numpy", "scipy", "sympy"}


def main() -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("bundle", "test", "bench"))
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu_bundle", help="the bundle")
    options, rest = parser.parse_known_args()
    if options.command == "bundle":
        return bundle(options.folder)
    site = installed_from(options.folder)
    found = subprocess.run([sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"])
    if found.returncode:
        print("no CUDA device: nothing was run")
        return NO_DEVICE
    paths = [str(ROOT), *([str(site)] if site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if options.command == "test":
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", "tests/gpu", *rest]
        if (site is not None and (site / "xdist").is_dir()) or present("pytest-xdist"):
            command[3:3] = ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    else:
        command = ["-m", "benchmarks.gpu", *rest]
    running = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True)
    try:
        return running.wait(SECONDS if options.command == "test" else None)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGTERM)
        print(f"not all tests ended within {SECONDS} s: name some, as in ARGS='-k kernels'")
        return 1
    except KeyboardInterrupt:
        os.killpg(running.pid, signal.SIGTERM)
        raise


def bundle(folder: Path) -> int:
    """Build or download wheels: the pure-Python ones among the dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder)]
    pending, seen = list(WANTED), set(NOT_CARRIED)
    while pending:
        requirement = pending.pop()
        name = canonical(requirement)
        if name in seen:
            continue
        seen.add(name)
        before = set(folder.glob("*.whl"))
        result = next((w for w in before if canonical(w.name.split("-")[0]) == name), None)
        if result is None:
            if subprocess.run([*wheels, requirement]).returncode:
                print(f"{requirement} has no wheel and could not be built")
                return 1
            result = next(iter(set(folder.glob("*.whl")) - before))
        if not result.name.endswith("-none-any.whl"):
            print(f"left out: {result.name} is for this machine only")
            result.unlink()
            continue
        pending += requirements(result)
    size = sum(w.stat().st_size for w in folder.glob("*.whl")) / 2**20
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size:.1f} MiB")
    return 0


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires without extras, for any Python."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found = []
    for line in text.splitlines():
        if line.startswith("Requires-Dist:"):
            requirement, _, condition = line.removeprefix("Requires-Dist:").partition(";")
            if not condition.strip():
                found.append(re.sub(r"[()]", "", requirement).replace(" ", ""))
    return found


def installed_from(folder: Path) -> Path | None:
    """A folder with those wheels of the bundle that this Python lacks."""
    wheels = [w for w in sorted(folder.glob("*.whl")) if not present(canonical(w.name.split("-")[0]))]
    if not wheels:
        return None
    site = folder / f"site-{sys.version_info.major}.{sys.version_info.minor}"
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True)
    return site


def present(name: str) -> bool:
    """Whether a distribution of this name is installed."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def canonical(requirement: str) -> str:
    """A distribution's name as the index writes it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found.group()).lower()


if __name__ == "__main__":
    sys.exit(main())
