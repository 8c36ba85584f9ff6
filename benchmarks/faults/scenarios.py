"""Scenarios: disks, caches and compilers that do not work; each ends with a run on a sound cache that must be right."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.children import Child, begin, finished
from benchmarks.faults.training import STEPS, train
from daceml_train.codegen.compiler import TIMEOUT
from daceml_train.errors import INTERNAL
from daceml_train.runtime.cache import Cache

Scenario = Callable[[Path], list[Child]]


def run(name: str, folder: Path, native: Path) -> dict[str, Any]:
    """What became of one scenario: children, those that were wrong, hung or failed, what was said, what is left."""
    before = _private_folders()
    cache = folder / name.replace(" ", "-") / "cache"
    shutil.copytree(native, cache / "native")
    for place in (cache, cache / "native"):
        place.chmod(0o700)
    start = time.monotonic()
    try:
        children = SCENARIOS[name](cache)
    except OSError as error:
        return {"not run": str(error)}
    seconds = time.monotonic() - start
    after = finished(functools.partial(_train, 3, folder / "sound"))
    every = [*children, after]
    results = [child.result for child in every]
    Cache(cache).evict()
    left = [str(p.relative_to(cache)) for p in cache.rglob(".building-*")] if os.access(cache, os.R_OK) else []
    left += sorted(_private_folders() - before)
    messages = {text for result in results if hasattr(result, "warned") for text in result.warned}
    return {
        "children": len(children),
        "right": sum(getattr(result, "right", False) for result in results[:-1]),
        "compiled": sum(getattr(result, "whole", False) for result in results[:-1]),
        "wrong": [f"{r.compiled} for {r.eager}" for r in results if hasattr(r, "right") and not r.right],
        "hangs": sum(child.hung for child in every),
        "failed": [
            *(str(r) for r in results[:-1] if not hasattr(r, "right")),
            *(text for text in messages if INTERNAL in text),  # a machine that lacks something is no defect
        ],
        "next run right": bool(getattr(after.result, "right", False) and after.result.whole),
        "left": left,
        "said": sorted(text.split("\n")[0][:300] for text in messages),
        "seconds": round(seconds, 1),
    }


def _train(number: int, cache: Path, marks: int) -> Any:
    return train(number, cache, marks)


def _private_folders() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).glob("daceml_train-private-*")}


def _limited(number: int, cache: Path, marks: int) -> Any:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes beyond the limit fail, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return train(number, cache, marks)


def _largest_file(cache: Path) -> list[Child]:
    return [finished(functools.partial(_limited, 0, cache)) for _ in range(2)]


@contextmanager
def _mounted(cache: Path, *options: str) -> Iterator[None]:
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(cache)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=False)


def _full(cache: Path) -> list[Child]:
    kept = cache.parent / "kept"
    shutil.copytree(cache / "native", kept)
    size = sum(file.stat().st_size for file in kept.glob("*")) + (48 << 10)
    with _mounted(cache, "-o", f"size={size},mode=700"):
        shutil.copytree(kept, cache / "native")
        return [finished(functools.partial(_train, number, cache)) for number in (0, 1, 0)]


def _read_only(cache: Path) -> list[Child]:
    warm = finished(functools.partial(_train, 0, cache))
    kept = cache.parent / "kept"
    shutil.copytree(cache, kept)
    with _mounted(cache, "-o", "mode=700"):
        shutil.copytree(kept, cache, dirs_exist_ok=True)
        done = subprocess.run(["mount", "-o", "remount,ro", str(cache)], capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
        return [warm, *(finished(functools.partial(_train, number, cache)) for number in (0, 1))]


def _foreign(cache: Path) -> list[Child]:
    warm = finished(functools.partial(_train, 0, cache))
    places = [cache, *(p for kind in ("kernels", "programs") for p in [cache / kind, *(cache / kind).glob("*")])]
    for place in places:  # not the executor, whose compilation elsewhere takes half a minute
        os.chown(place, 4321, 4321)
    results = [warm, *(finished(functools.partial(_train, number, cache)) for number in (0, 1))]
    for place in places:
        os.chown(place, os.geteuid(), os.getegid())
    return results


def _open(cache: Path) -> list[Child]:
    warm = finished(functools.partial(_train, 0, cache))
    for place in [*(cache / "kernels").glob("*"), *(cache / "programs").glob("*"), cache / "kernels"]:
        place.chmod(0o777)
    return [warm, *(finished(functools.partial(_train, number, cache)) for number in (0, 1))]


def _together(numbers: tuple[int, ...], cache: Path) -> list[Child]:
    children = [begin(functools.partial(_train, number, cache)) for number in numbers]
    for child in children:
        child.end()
    return children


def _compiler(text: str, cache: Path) -> list[Child]:
    command = cache.parent / "compiler"
    command.write_text(f"#!/bin/sh\n{text}\n")
    command.chmod(0o755)
    before = {name: os.environ.get(name) for name in ("CXX", TIMEOUT)}
    os.environ |= {"CXX": str(command), TIMEOUT: "3"}
    try:
        return [finished(functools.partial(_train, number, cache)) for number in (0, 1)]
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _missing(cache: Path) -> list[Child]:
    before = os.environ.get("CXX")
    os.environ["CXX"] = str(cache / "no-such-compiler")
    try:
        return [finished(functools.partial(_train, 0, cache))]
    finally:
        os.environ.pop("CXX") if before is None else os.environ.update({"CXX": before})


def _interrupted(moment: str, steps: int, spread: float, cache: Path) -> list[Child]:
    """SIGINT at such a moment ends the run with KeyboardInterrupt, and the next run is right."""
    children, interrupted = [], 0
    for turn in range(6):
        child = begin(functools.partial(_patient, turn, steps, cache))
        child.await_moment(moment)
        child.listen(time.monotonic() + spread * turn)
        child.kill(signal.SIGINT)
        child.end()
        ended = isinstance(child.result, str) and child.result.startswith("KeyboardInterrupt")
        interrupted += ended
        children += [] if ended else [child]  # ended otherwise, or before
        children.append(finished(functools.partial(_train, turn, cache)))
    if not interrupted:
        raise OSError("every run ended before it was interrupted")
    return children


def _patient(number: int, steps: int, cache: Path, marks: int) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return train(number, cache, marks, steps=steps)


SCENARIOS: dict[str, Scenario] = {
    "files of 4 KiB at most": _largest_file,
    "full disk": _full,
    "read-only cache": _read_only,
    "cache of another user": _foreign,
    "cache that all may write": _open,
    "four processes, one model": functools.partial(_together, (0, 0, 0, 0)),
    "four processes, four models": functools.partial(_together, (0, 1, 2, 3)),
    "missing compiler": _missing,
    "failing compiler": functools.partial(_compiler, "echo no license >&2; exit 1"),
    "compiler that hangs": functools.partial(_compiler, "sleep 4242"),
    "compiler that hangs once asked to compile": functools.partial(
        _compiler, 'case "$*" in *--version*) exec g++ --version;; esac; sleep 4242'
    ),
    "compiler that is killed": functools.partial(
        _compiler, 'case "$*" in *--version*) exec g++ --version;; esac; kill -9 $$'
    ),
    "SIGINT in capture and build": functools.partial(_interrupted, "capture", STEPS, 0.1),
    "SIGINT in a step": functools.partial(_interrupted, "step", 2000, 0.01),
}
