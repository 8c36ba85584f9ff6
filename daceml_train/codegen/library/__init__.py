"""Hand-written kernels and the launches that run them; their C++ headers lie in `native/`."""
