"""Hand-written kernels and their launches; the C++ headers are in `native/`."""
