"""cache, passes, stages: compiled programs on disk, the transformations, and the stages of compilation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure


def add(commands: Any) -> None:
    """Register the commands."""
    cache = commands.add_parser(
        "cache", help="compiled programs on disk", description="Show or remove compiled programs."
    )
    cache.add_argument("action", choices=("show", "clear"), help="show: folder and sizes; clear: remove everything")
    cache.add_argument("--folder", type=Path, help="default: $DACEML_TRAIN_CACHE or the user's cache folder")
    cache.set_defaults(run=_cache)

    passes = commands.add_parser(
        "passes",
        help="the available transformations",
        description="List all passes by level, or explain one: its picture, its bytes, its options.",
    )
    passes.add_argument("name", nargs="?", metavar="PASS", help="the pass to explain")
    passes.set_defaults(run=_passes)

    stages = commands.add_parser(
        "stages",
        help="the stages of compilation",
        description="List the stages from a captured graph to a running program: name, scope, action.",
    )
    stages.set_defaults(run=_stages)


def _cache(options: argparse.Namespace) -> int:
    from daceml_train.reporting import bytes_text
    from daceml_train.runtime.cache import Cache
    from daceml_train.storage.folders import cache_folder

    folder = cache_folder(options.folder)
    if options.action == "clear":
        print(f"{bytes_text(Cache(folder).clear())} removed from {folder}")
        return 0
    print(folder)
    for kind in ("captures", "programs", "kernels", "native"):
        files = [f for f in (folder / kind).rglob("*") if f.is_file()]
        print(f"  {kind:9} {len(files):6}  {bytes_text(sum(f.stat().st_size for f in files)):>9}")
    return 0


def _passes(options: argparse.Namespace) -> int:
    from daceml_train.errors import Invalid
    from daceml_train.passes.base import LEVELS
    from daceml_train.passes.registry import find
    from daceml_train.transformations import catalog

    known = catalog.passes()
    if options.name is not None:
        try:
            print(find(options.name).describe())
        except Invalid as error:
            raise Failure(str(error)) from None
        return 0
    for level in LEVELS:
        print(level)
        for name, kind in known.items():
            if kind.level == level:
                print(f"  {name:28} {' '.join(kind.describe().summary.split())}")
    return 0


def _stages(options: argparse.Namespace) -> int:
    from daceml_train.driver.compile import STAGES

    print(STAGES)
    return 0
