"""CUDA kernels from the bodies that CPU kernels are made from: geometry, SDFG, text, nvcc."""
