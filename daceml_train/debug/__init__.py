"""For users who are stuck: what of a model is compiled and why not, and which operator or pass makes a wrong number."""

from daceml_train.debug.explanation import Explanation, Note, explain
from daceml_train.debug.search import Bisection, Finding, bisect

__all__ = ["Bisection", "Explanation", "Finding", "Note", "bisect", "explain"]
