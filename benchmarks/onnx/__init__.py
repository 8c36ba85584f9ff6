"""ONNX conformance: the official cases, round trips of networks, and ONNX Runtime for comparison."""
