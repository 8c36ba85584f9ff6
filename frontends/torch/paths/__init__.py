"""Paths: what a model does in one call, recorded as a path of a trie, and found again while the model runs."""
