"""Models of other people's making, at small sizes, and the comparison of their compiled training with eager execution."""
