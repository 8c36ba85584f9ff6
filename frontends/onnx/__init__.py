"""ONNX models as modules: read, run, train, save."""

from daceml_train.frontends.onnx.module import OnnxModule, load
from daceml_train.frontends.onnx.saving import save_onnx

__all__ = ["OnnxModule", "load", "save_onnx"]
