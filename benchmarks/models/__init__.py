"""Models of other people's making, at small sizes, and how their compiled training compares with eager execution."""
