"""NETWORKS: name -> what is measured under it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.networks.lstm import LoopLSTM
from benchmarks.networks.mixer import Mixer
from benchmarks.networks.mlp import mlp
from benchmarks.networks.network import Network
from benchmarks.networks.resnet import ResNet18
from benchmarks.networks.transformer import LanguageModel, token_loss


def images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random images of three channels and random classes."""
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


def vectors(batch: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random vectors and random classes."""
    return torch.randn(batch, width), torch.randint(0, classes, (batch,))


def tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random sequences of tokens, and for each token its successor."""
    text = torch.randint(0, vocabulary, (batch, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


_SGD = torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}
_ADAM = torch.optim.Adam, {"lr": 1e-3}
_ADAMW = torch.optim.AdamW, {"lr": 1e-3}

NETWORKS: dict[str, Network] = {
    "resnet18": Network(
        "ResNet-18, 8 images of 96x96, SGD with momentum",
        partial(ResNet18, 1000), partial(images, 8, 96, 1000), F.cross_entropy, *_SGD, images=True,
    ),
    "gpt": Network(
        "Pre-LN transformer, 4 layers, 256 wide, 8 x 128 characters, AdamW",
        partial(LanguageModel, 96, 128), partial(tokens, 8, 128, 96), token_loss, *_ADAMW,
    ),
    "bert": Network(
        "Post-LN transformer, 4 layers, 256 wide, 8 x 128 tokens, Adam",
        partial(LanguageModel, 1000, 128, before=False), partial(tokens, 8, 128, 1000), token_loss, *_ADAM,
    ),
    "mixer": Network(
        "MLP-Mixer, 4 blocks, 64 patches x 256, 16 images, AdamW",
        Mixer, partial(images, 16, 64, 10), F.cross_entropy, *_ADAMW,
    ),
    "lstm": Network(
        "LSTM as a Python loop, 128 wide, 16 x 64 characters, SGD with momentum",
        LoopLSTM, partial(tokens, 16, 64, 256), token_loss, *_SGD,
    ),
    "mlp": Network(
        "MLP, 784-1024-1024-10, 64 vectors, Adam",
        partial(mlp, (784, 1024, 1024, 10)), partial(vectors, 64, 784, 10), F.cross_entropy, *_ADAM,
    ),
}  # fmt: skip
"""Sizes give steps of some milliseconds to some hundred milliseconds on two cores."""
