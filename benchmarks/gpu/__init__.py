"""Measurements on a CUDA device: `make bench-gpu`."""
