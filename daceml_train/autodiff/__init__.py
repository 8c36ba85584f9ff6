"""Reverse-mode differentiation of operator graphs, and the choice of arrays saved for the backward pass."""
