"""Analyses of a graph: aliases, liveness, sizes, traffic, validity, and a NumPy interpreter."""
