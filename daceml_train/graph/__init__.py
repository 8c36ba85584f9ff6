"""The operator graph: how it is built, shown as text, verified, interpreted and measured in bytes."""
