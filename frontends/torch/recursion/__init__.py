"""Recursion over data: what a model computes node by node is recorded, cut into cells, and run level by level."""
