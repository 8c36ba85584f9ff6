"""What of a pipeline depends on the device."""

import daceml_train as dt
from daceml_train.driver.devices import pipeline_for
from daceml_train.runtime.device import CPU
from daceml_train.transformations.global_movement.update_in_parts import UpdateInParts
from daceml_train.transformations.intra_operator.attend_in_strips import AttendInStrips
from daceml_train.transformations.layout.convolve_by_product import ConvolveByProduct
from tests.runtime.emulation import HostKernels


class Emulated:
    toolchain = HostKernels()


def test_passes_for_the_processor_alone_are_left_out() -> None:
    assert pipeline_for(dt.TRAINING, CPU) == dt.TRAINING
    without = dt.TRAINING.without(AttendInStrips, ConvolveByProduct, UpdateInParts)
    assert pipeline_for(dt.TRAINING, Emulated()) == without
    assert pipeline_for(without, Emulated()) == without
