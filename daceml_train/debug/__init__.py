"""For users who are stuck: what of a model is not compiled and why, and which operator or pass is wrong."""

from daceml_train.debug.explanation import Explanation, Note, explain
from daceml_train.debug.levels import level_times
from daceml_train.debug.search import Bisection, Finding, bisect

__all__ = ["Bisection", "Explanation", "Finding", "Note", "bisect", "explain", "level_times"]
