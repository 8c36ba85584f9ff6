"""`make setup`: a virtual environment in .venv with everything the project needs. A second run does nothing, offline.

Environment: TORCH_INDEX, the package index to take PyTorch from at the first installation (default: its CPU index if
that answers, else the ordinary one); CXX, the C++ compiler to look for (default g++).
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
NATIVE = ROOT / "daceml_train" / "runtime"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHONS = ((3, 12), (3, 11))
OLDEST_COMPILER = 11  # complete enough in C++20


def main() -> None:
    """Bring .venv up to date; each step prints what it does, and is skipped if it is already done."""
    use_supported_python()
    files = [ROOT / "pyproject.toml", Path(__file__)]
    if not done("setup", files):
        say("looking for a C++ compiler")
        check_compiler()
        if not PYTHON.exists():
            say(f"creating .venv with Python {sys.version.split()[0]}")
            create_venv()
        if not installed("torch"):
            install_torch()
        say("installing daceml_train (editable) and what it needs; the first time this takes minutes")
        if not pip("--editable", ".[demo,notebook,search,dev]"):
            fail("pip could not install the project; see its message above")
        if not pip("--editable", ".[gpu]"):
            say("without nvidia-cuda-nvdisasm: tests that read the machine code of CUDA kernels are skipped")
        mark_done("setup", files)
    if (NATIVE / "native_build.py").exists():
        files = [NATIVE / "native_build.py", *sorted((NATIVE / "native").glob("*"))]
        if not done("native", files):
            say("building the native runtime")
            if subprocess.call([PYTHON, "-m", "daceml_train.runtime.native_build"], cwd=ROOT) != 0:
                fail("the native runtime did not build; see the compiler's message above")
            mark_done("native", files)
    say("ready")


def use_supported_python() -> None:
    """Continue under a supported Python, or say which one is missing."""
    if sys.version_info[:2] in PYTHONS:
        return
    for major, minor in PYTHONS:
        other = shutil.which(f"python{major}.{minor}")
        if other:
            os.execv(other, [other, str(Path(__file__)), *sys.argv[1:]])
    names = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    here = sys.version.split()[0]
    fail(f"Python {names} is needed, this is {here}; name one with: make setup PYTHON=/path/to/python3.12")


def create_venv() -> None:
    """Create .venv with this Python."""
    if subprocess.call([sys.executable, "-m", "venv", str(VENV)]) != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        fail("could not create .venv; on Debian and Ubuntu install the package python3-venv first")


def check_compiler() -> None:
    """Fail unless there is a recent C++ compiler: models are compiled when they first run."""
    command = shlex.split(os.environ.get("CXX") or "g++")  # it may have arguments: CXX="ccache g++"
    compiler = command[0]
    how = "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or name one with CXX=/path/to/g++"
    if not shutil.which(compiler):
        fail(f"no C++ compiler {compiler!r} found; {how}")
    answer = subprocess.run([*command, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    version = re.match(r"\d+", answer.stdout)
    if not version or int(version[0]) < OLDEST_COMPILER:
        fail(f"{compiler} is version {answer.stdout.strip() or 'unknown'}, {OLDEST_COMPILER} or newer is needed; {how}")


def install_torch() -> None:
    """Install PyTorch first and alone: on Linux the default index has the CUDA build, which takes gigabytes."""
    pins = re.findall(r'^\s*"(torch[<>=][^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    index = os.environ.get("TORCH_INDEX")
    if index:
        say(f"installing PyTorch from {index}")
        if not pip(*pins, "--index-url", index):
            fail(f"pip could not install {pins[0]} from TORCH_INDEX={index}")
        return
    if sys.platform == "linux" and answers(f"{CPU_INDEX}/torch/"):
        say(f"installing PyTorch from {CPU_INDEX}; choose another index with TORCH_INDEX=")
        if pip(*pins, "--index-url", CPU_INDEX):
            return
    say("installing PyTorch from pip's default index")
    if not pip(*pins):
        fail(f"pip could not install {pins[0]}")


def pip(*arguments: str) -> bool:
    """Run pip in .venv from the project's root; whether it succeeded."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.call(command, cwd=ROOT) == 0


def installed(package: str) -> bool:
    """Whether .venv has a package, of any version: pip does the rest."""
    return any(VENV.glob(f"lib/python*/site-packages/{package}-*.dist-info"))


def answers(address: str) -> bool:
    """Whether an address answers within a few seconds."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def key(files: list[Path]) -> str:
    """Changes when one of the files does, or the place of the checkout, or the interpreter or PyTorch in .venv."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in VENV.glob("lib/python*/site-packages/torch-*.dist-info"):
        digest.update(str(path).encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def done(step: str, files: list[Path]) -> bool:
    """Whether a step has succeeded before, on these files."""
    stamp = VENV / f".{step}"
    return PYTHON.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key(files)


def mark_done(step: str, files: list[Path]) -> None:
    """Record the success of a step."""
    (VENV / f".{step}").write_text(key(files), encoding="utf-8")


def say(line: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"[setup {time.monotonic() - START:5.1f} s] {line}", flush=True)


def fail(reason: str) -> NoReturn:
    """Exit with a message that says what to do."""
    sys.exit(f"[setup] {reason}")


START = time.monotonic()

if __name__ == "__main__":
    main()
