"""Rules from installed packages: the entry-point group `daceml_train.onnx_operators`."""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import entry_points

GROUP = "daceml_train.onnx_operators"


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import what packages offer, once; each module registers its rules. One that fails is named and left out."""
    loaded = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
            loaded.append(entry.name)
        except Exception as error:  # one package's mistake must not stop the others
            warnings.warn(f"the ONNX operators of {entry.name!r} could not be loaded: {error}", stacklevel=2)
    return tuple(loaded)
