"""DaCe's viewer, as a widget's page loads it."""

from __future__ import annotations

import functools
import gzip
import importlib.util
from pathlib import Path


@functools.cache
def viewer_source() -> bytes:
    """The script of DaCe's viewer, as its package has it, compressed. DaCe itself is not imported."""
    found = importlib.util.find_spec("dace")
    assert found is not None and found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / "viewer" / "webclient" / "dist" / "sdfv_jupyter.js"
    return gzip.compress(path.read_bytes(), 6)
