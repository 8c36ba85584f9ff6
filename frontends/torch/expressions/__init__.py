"""Expressions in PyTorch: the operator of the dispatcher, its evaluation, and `dt.expression`."""
