"""Rewrites, passes and pipelines as immutable values, and the plugins that add to them."""
