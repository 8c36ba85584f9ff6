"""Lowering of an operator graph to a program: buffers, the arena plan, streams, costs, and the device interface."""
