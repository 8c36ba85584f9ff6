"""PyTorch's own operator samples against eager execution: values and gradients, interpreted and compiled."""
