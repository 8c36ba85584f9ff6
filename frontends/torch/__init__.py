"""Capture of PyTorch modules: a forward graph of Core ATen operators becomes an operator graph.

`capture.capture` is the entry; `prepass` and `trace` keep what gradients depend on, `rules.translate` and the
tables of `rules` emit operators, `rules.fallback` calls PyTorch for those without a rule.
"""
