"""A training compiler for PyTorch models, built on DaCe.

The public names are imported at first use, so `import daceml_train` is quick. No submodule has a public name:
importing it would bind it as an attribute here, where it would hide the function of the same name.
"""

import importlib
from typing import Any

from daceml_train import renamed as _renamed

__version__ = "0.1.0"

_HOME = {
    "optimize": "daceml_train.driver",
    "training_step": "daceml_train.driver",
    "Options": "daceml_train.driver",
    "ShardedEmbedding": "daceml_train.driver.sharded_embedding",
    "dace_operator": "daceml_train.driver.dace_operator",
    "expression": "daceml_train.frontends.torch.expressions.function",
    "recursive": "daceml_train.frontends.torch.recursion.detect",
    "to_sdfg": "daceml_train.driver.given",
    "from_sdfg": "daceml_train.driver.given",
    "load_onnx": "daceml_train.driver",
    "save_onnx": "daceml_train.driver",
    "report": "daceml_train.reporting",
    "tune": "daceml_train.reporting.tuning",
    "Link": "daceml_train.runtime.links",
    "Session": "daceml_train.exploration",
    "replay": "daceml_train.exploration",
    "explore": "daceml_train.exploration.widget.explorer",
    "export_html": "daceml_train.exploration.export.page",
    "compare": "daceml_train.exploration",
    "Stages": "daceml_train.trials",
    "schedule": "daceml_train.trials",
    "run_trials": "daceml_train.trials",
    "torch_function": "daceml_train.frontends.torch.extension",
    "Operator": "daceml_train.ops.operator",
    "TRAINING": "daceml_train.transformations.pipelines",
    "INFERENCE": "daceml_train.transformations.pipelines",
    "MIXED_PRECISION": "daceml_train.transformations.pipelines",
    "Pipeline": "daceml_train.transformations.pipelines",  # where its texts know all passes
    "Pass": "daceml_train.passes",
    "Rewrite": "daceml_train.passes",
    "Unsupported": "daceml_train.errors",
    "Invalid": "daceml_train.errors",
    "Refused": "daceml_train.errors",
}

_MODULES = ("debug",)
"""Public modules, imported at first use as well."""

__all__ = ["__version__", *_HOME]


_renamed.install()


def __getattr__(name: str) -> Any:
    """Import a public name from its module; AttributeError for every other name."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        hint = f"; it is {__name__}.debug.{name}" if name in ("explain", "bisect") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except (ImportError, AttributeError) as error:
        if refusal := importlib.import_module("daceml_train.internals").refusal():
            raise ImportError(refusal) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not, and what the module holds."""
    return sorted({*globals(), *__all__, *_MODULES})
