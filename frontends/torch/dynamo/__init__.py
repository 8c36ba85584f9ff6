"""What is taken from TorchDynamo: traces, polyfills, the origin of a node."""
