"""The catalog: every pass of this package by name, including those that no built-in pipeline contains."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import daceml_train.transformations
from daceml_train.passes.base import Pass
from daceml_train.passes.registry import registered


@cache
def load() -> None:
    """Import every module of this package; passes register themselves as their classes are defined."""
    folders = daceml_train.transformations
    for module in pkgutil.walk_packages(folders.__path__, f"{folders.__name__}."):
        if module.name not in (__name__, f"{folders.__name__}.pipelines"):
            importlib.import_module(module.name)


def passes() -> dict[str, type[Pass]]:
    """Name -> class of every pass, plugins' included."""
    load()
    return registered()
