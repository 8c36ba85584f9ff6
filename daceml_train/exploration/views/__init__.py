"""What a viewer draws of a graph: the tree of boxes, details of a box, times, saved arrays."""
