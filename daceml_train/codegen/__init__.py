"""Code generation: from kernels to maps, and from maps to compiled functions."""
