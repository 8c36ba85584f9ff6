"""Operators: one file per family, where each says its signature, shapes, lowering, derivative and cost."""
