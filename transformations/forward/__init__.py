"""The level before differentiation: what is easier to see, or to save, in the forward pass alone."""
