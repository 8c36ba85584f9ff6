"""The uses of TorchDynamo: traces, polyfills, the origin of a node."""
