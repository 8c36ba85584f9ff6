"""Measurements against PyTorch, and the demonstration. Nothing here is installed with the package."""
