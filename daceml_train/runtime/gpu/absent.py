"""A GPU that is not there: programs are lowered for it and their time is estimated, but they cannot run."""

from __future__ import annotations

import torch

from daceml_train.analysis.device_model import DeviceModel
from daceml_train.lowering.device import Device
from daceml_train.runtime.gpu.toolchain import CudaToolchain


class AbsentGPU(Device):
    """A device of this model. Its kernels are generated, but not compiled."""

    target = "cuda"
    torch = torch.device("cpu")
    present = False

    def __init__(self, model: DeviceModel) -> None:
        self.model, self.name = model, model.title
        self.toolchain = CudaToolchain(model.architecture, model.processors)
