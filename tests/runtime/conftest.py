"""The kernels of hand-built plans, for every test of the executor."""

from tests.runtime.executing import kernels

__all__ = ["kernels"]
