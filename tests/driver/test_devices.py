"""What of a pipeline depends on the device."""

import daceml_train as dt
from daceml_train.driver.devices import pipeline_for
from daceml_train.lowering.device import CPU
from daceml_train.transformations.forward.blocked_attention import BlockedAttention
from daceml_train.transformations.global_movement.chunk_updates import ChunkUpdates
from daceml_train.transformations.layout.convolution_as_matmul import ConvolutionAsMatmul
from tests.runtime.emulation import HostKernels


class Emulated:
    toolchain = HostKernels()


def test_passes_for_the_processor_alone_are_left_out() -> None:
    assert pipeline_for(dt.TRAINING, CPU) == dt.TRAINING
    without = dt.TRAINING.without(BlockedAttention, ConvolutionAsMatmul, ChunkUpdates)
    assert pipeline_for(dt.TRAINING, Emulated()) == without
    assert pipeline_for(without, Emulated()) == without
