"""CPU kernels: from a kernel's plan to an SDFG, to C++ text, to a compiled library."""
