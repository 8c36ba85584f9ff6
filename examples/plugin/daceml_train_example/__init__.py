"""A plugin for daceml_train: the operator `softcap` and the pass `negated_products`."""

from daceml_train_example.softcap import softcap

__all__ = ["softcap"]
