"""Reverse-mode differentiation of operator graphs, and the choice of what the backward pass keeps."""
