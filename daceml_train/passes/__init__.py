"""Transformations as values: passes, rewrites with legality and promised bytes, immutable pipelines."""

from daceml_train.passes.base import LEVELS, Match, Pass, Rewrite, View
from daceml_train.passes.pipeline import Pipeline, Step

__all__ = ["LEVELS", "Match", "Pass", "Pipeline", "Rewrite", "Step", "View"]
