"""Running a program on a GPU: memory, streams, CUDA graphs, autotuning."""
