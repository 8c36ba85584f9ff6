"""Random models trained by compiled steps and compiled modules, held to eager execution and to float64."""

from benchmarks.fuzz.case import Case, Layer
from benchmarks.fuzz.checking import check

__all__ = ["Case", "Layer", "check"]
