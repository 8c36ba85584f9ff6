"""Novel operators as expressions, against the best composition of PyTorch operators."""
