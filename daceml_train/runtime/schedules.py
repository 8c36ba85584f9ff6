"""Schedules of tiled kernels that were measured on this machine, on disk: programs that are loaded take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daceml_train.codegen.cpu.compile import compiler_version
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.library.tiles import tiled
from daceml_train.runtime.machine_load import machine
from daceml_train.storage.files import keep


def scheduled(codes: Sequence[KernelCode], path: Path) -> list[KernelCode]:
    """The codes with the schedules that the file has for them."""
    if not path.exists() or all(code.nest is None for code in codes):
        return list(codes)
    known = stored(path)
    return [_chosen(code, known.get(key_of(code), {})) for code in codes]


def _chosen(code: KernelCode, entry: Mapping[str, Any]) -> KernelCode:
    chosen = entry.get("chosen")
    if code.nest is None or not isinstance(chosen, str) or chosen == code.schedule:
        return code
    try:
        return tiled(*code.nest, chosen) or code
    except (KeyError, ValueError):  # a damaged entry
        return code


def key_of(code: KernelCode) -> str:
    """The key of a nest with its sizes: the kernel of its default schedule, this machine, and its compiler."""
    if code.nest is None:
        return code.key
    default = tiled(*code.nest)
    return f"{machine()}, {compiler_version()}: {default.key if default is not None else code.key}"


def stored(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of the file, by key; empty for a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def store(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Add entries, atomically, to those that other processes stored in the meantime."""
    keep(path, json.dumps(stored(path) | dict(entries), indent=0).encode())


__all__ = ["key_of", "scheduled", "store", "stored"]
