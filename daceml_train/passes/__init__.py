"""Transformations as values: passes, rewrites with legality and promised bytes, immutable pipelines."""

from daceml_train.passes.base import LEVELS, Candidate, Match, Pass, Rewrite, Uses
from daceml_train.passes.pipeline import Pipeline, Step

__all__ = ["LEVELS", "Candidate", "Match", "Pass", "Pipeline", "Rewrite", "Step", "Uses"]
