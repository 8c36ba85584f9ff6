"""How graphs are compiled, once what a user said is checked and resolved; see `driver.options`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from daceml_train.driver.dump import Dump
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.passes.pipeline import Pipeline, Watcher
from daceml_train.runtime.cache import Cache
from daceml_train.storage.folders import cache_folder
from daceml_train.transformations.pipelines import TRAINING

Concurrency = Literal["measured", "off"]
"""On CPUs: each launch takes the number of threads that is fastest, or all launches take all threads."""


@dataclass(frozen=True)
class Settings:
    """How graphs are compiled.

    `jobs` compiler processes run at once (None: one per core); `dump` receives the graph after each pass and what is
    generated, and keeps the cache out; `pass_callback` hears of each pass, also of those whose result came from the
    cache; `progress` is told (kernels done, kernels in all) while kernels compile; `dynamic` is that of
    `torch.compile`; `cuda_graphs` says whether a module's calls become CUDA graphs.
    """

    pipeline: Pipeline = TRAINING
    cache: Cache = field(default_factory=lambda: Cache(cache_folder()))
    jobs: int | None = None
    dump: Dump | None = None
    progress: Callable[[int, int], None] | None = None
    pass_callback: Watcher | None = None
    dynamic: bool | None = None
    randomness: Randomness = "seeded"
    autotune: bool = True
    concurrency: Concurrency = "measured"
    cuda_graphs: bool = False
    matmuls: Path | None = None
    """Where the measured choices of libraries are kept that processes share; None: in the cache."""
    inference: Pipeline | None = None
    """For calls without gradients; None: `pipeline` for them, too."""
    compiled_only: bool = False
    """Whether programs only come from the cache; `NotCompiled` is raised for others."""

    def __getstate__(self) -> dict[str, Any]:
        """Without `pass_callback` and `progress`, which belong to this process."""
        return {**self.__dict__, "pass_callback": None, "progress": None}
