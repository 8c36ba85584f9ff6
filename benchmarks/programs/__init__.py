"""Imperative PyTorch programs: models whose forward pass is Python, not a graph."""
