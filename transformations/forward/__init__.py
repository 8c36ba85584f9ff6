"""The level before differentiation: rewrites that are easier to recognize, or save more, in the forward graph."""
