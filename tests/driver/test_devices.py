"""What of a pipeline depends on the device."""

import daceml_train as dt
from daceml_train.transformations.forward.blocked_attention import BlockedAttention
from daceml_train.transformations.global_movement.chunk_updates import ChunkUpdates
from daceml_train.transformations.global_movement.concurrency import Concurrency
from daceml_train.transformations.layout.convolution_as_matmul import ConvolutionAsMatmul
from daceml_train.transformations.layout.fuse_matmul_epilogue import FuseMatmulEpilogue
from daceml_train.transformations.layout.winograd_convolution import WinogradConvolution


def test_passes_for_the_processor_alone_are_left_out() -> None:
    assert dt.TRAINING.for_target("cpu") is dt.TRAINING
    own = (BlockedAttention, WinogradConvolution, FuseMatmulEpilogue, ConvolutionAsMatmul, ChunkUpdates, Concurrency)
    without = dt.TRAINING.without(*own)
    assert dt.TRAINING.for_target("cuda") == without
    assert without.for_target("cuda") is without
