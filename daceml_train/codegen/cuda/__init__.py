"""CUDA kernels from the same bodies as CPU kernels: launch configuration, SDFG, text, nvcc."""
