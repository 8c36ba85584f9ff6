"""Capture of PyTorch modules: a forward graph of Core ATen operators becomes an operator graph."""
