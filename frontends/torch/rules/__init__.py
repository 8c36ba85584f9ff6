"""The translation of each ATen operator into operators of the graph."""
