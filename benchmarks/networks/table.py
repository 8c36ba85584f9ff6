"""NETWORKS: name -> what is measured under it. TWELVE are those whose traffic and time are reported."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.networks.dlrm import DLRM
from benchmarks.networks.fcn import FCN8s
from benchmarks.networks.inverted_residual import Stage, efficientnet_b0, mobilenet_v2
from benchmarks.networks.lstm import LoopLSTM
from benchmarks.networks.mixer import Mixer
from benchmarks.networks.mlp import mlp
from benchmarks.networks.network import Network
from benchmarks.networks.resnet import ResNet18, ResNet50
from benchmarks.networks.transformer import GPT2, Bert, LanguageModel, VisionTransformer, token_loss
from benchmarks.networks.wavenet import WaveNet


def images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random images of three channels and random classes."""
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


def segments(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random images of three channels and a random class for each pixel."""
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch, size, size))


def vectors(batch: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random vectors and random classes."""
    return torch.randn(batch, width), torch.randint(0, classes, (batch,))


def tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random sequences of tokens, and for each token its successor."""
    text = torch.randint(0, vocabulary, (batch, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def sentences(batch: int, length: int, vocabulary: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random sequences of tokens, and a random class for each."""
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, classes, (batch,))


def clicks(batch: int, dense: int, tables: int, rows: int, each: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Random dense features and `each` random rows per table, and a probability for each example."""
    return (torch.randn(batch, dense), torch.randint(0, rows, (tables, batch, each))), torch.rand(batch)


_SGD = torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}
_PLAIN = torch.optim.SGD, {"lr": 1e-3}
_ADAM = torch.optim.Adam, {"lr": 1e-4}
_ADAMW = torch.optim.AdamW, {"lr": 1e-3}
_FEW = Stage(1, 8, 1, 1), Stage(3, 8, 2, 2), Stage(3, 12, 1, 2, 5)

TWELVE: dict[str, Network] = {
    "resnet50": Network(
        "ResNet-50, 8 images of 160x160, SGD with momentum",
        ResNet50,
        partial(images, 8, 160, 1000),
        F.cross_entropy,
        *_SGD,
        images=True,
        small=(partial(ResNet50, 10, blocks=(1, 2), base=8), partial(images, 4, 32, 10)),
    ),
    "wide_resnet50_2": Network(
        "Wide ResNet-50-2, 4 images of 160x160, SGD with momentum",
        partial(ResNet50, wide=2),
        partial(images, 4, 160, 1000),
        F.cross_entropy,
        *_SGD,
        images=True,
        small=(partial(ResNet50, 10, wide=2, blocks=(1, 1), base=8), partial(images, 4, 32, 10)),
    ),
    "mobilenet_v2": Network(
        "MobileNetV2, 16 images of 160x160, SGD with momentum",
        mobilenet_v2,
        partial(images, 16, 160, 1000),
        F.cross_entropy,
        *_SGD,
        images=True,
        small=(partial(mobilenet_v2, _FEW, 8, 16, 10), partial(images, 4, 32, 10)),
    ),
    "efficientnet_b0": Network(
        "EfficientNet-B0, 8 images of 160x160, SGD with momentum",
        efficientnet_b0,
        partial(images, 8, 160, 1000),
        F.cross_entropy,
        *_SGD,
        images=True,
        small=(partial(efficientnet_b0, _FEW, 8, 16, 10), partial(images, 4, 32, 10)),
    ),
    "fcn8s": Network(
        "FCN-8s, one image of 224x224, SGD with momentum",
        FCN8s,
        partial(segments, 1, 224, 21),
        F.cross_entropy,
        *_SGD,
        images=True,
        small=(partial(FCN8s, 5, 16, 4), partial(segments, 2, 32, 5)),
    ),
    "mixer": Network(
        "MLP-Mixer, 8 blocks, 196 patches x 512, 8 images, SGD with momentum",
        Mixer,
        partial(images, 8, 224, 1000),
        F.cross_entropy,
        *_SGD,
        small=(partial(Mixer, 32, 8, 32, 2, 24, 64, 10), partial(images, 4, 32, 10)),
    ),
    "vit_s": Network(
        "ViT-S/16, 4 images of 224x224, Adam",
        VisionTransformer,
        partial(images, 4, 224, 1000),
        F.cross_entropy,
        *_ADAM,
        small=(partial(VisionTransformer, 32, 8, 32, 2, 2, 10), partial(images, 4, 32, 10)),
    ),
    "wavenet": Network(
        "WaveNet, 20 layers, 64 channels, 2 x 4000 samples, Adam",
        WaveNet,
        partial(tokens, 2, 4000, 256),
        F.cross_entropy,
        *_ADAM,
        small=(partial(WaveNet, 8, 12, 4, 16, 3), partial(tokens, 2, 40, 16)),
    ),
    "bert": Network(
        "BERT, 4 layers, 768 wide, 4 x 128 tokens, dropout, Adam",
        Bert,
        partial(sentences, 4, 128, 30522, 2),
        F.cross_entropy,
        *_ADAM,
        small=(partial(Bert, 50, 32, 2, 2, 24), partial(sentences, 4, 16, 50, 2)),
    ),
    "gpt2": Network(
        "GPT-2, 4 layers, 768 wide, 2 x 256 tokens, Adam",
        GPT2,
        partial(tokens, 2, 256, 50257),
        token_loss,
        *_ADAM,
        small=(partial(GPT2, 50, 32, 2, 2, 24), partial(tokens, 2, 16, 50)),
    ),
    "dlrm": Network(
        "DLRM, 26 tables of 100,000 rows, 512 examples, SGD",
        DLRM,
        partial(clicks, 512, 13, 26, 100_000, 4),
        F.binary_cross_entropy_with_logits,
        *_PLAIN,
        small=(partial(DLRM, 3, 40, 8, (5, 16), (16, 8)), partial(clicks, 6, 5, 3, 40, 2)),
    ),
    "lstm": Network(
        "LSTM as a Python loop, 128 wide, 16 x 64 tokens, SGD with momentum",
        partial(LoopLSTM, 1000),
        partial(tokens, 16, 64, 1000),
        token_loss,
        *_SGD,
        small=(partial(LoopLSTM, 20, 16), partial(tokens, 3, 6, 20)),
    ),
}
"""The sizes yield steps of 0.05 to 3 s on two cores."""

NETWORKS: dict[str, Network] = TWELVE | {
    "resnet18": Network(
        "ResNet-18, 8 images of 96x96, SGD with momentum",
        ResNet18,
        partial(images, 8, 96, 1000),
        F.cross_entropy,
        *_SGD,
        images=True,
        small=(partial(ResNet18, 10, 8), partial(images, 4, 32, 10)),
    ),
    "gpt": Network(
        "Pre-LN transformer, 4 layers, 256 wide, 8 x 128 characters, AdamW",
        partial(LanguageModel, 96, 128),
        partial(tokens, 8, 128, 96),
        token_loss,
        *_ADAMW,
        small=(partial(LanguageModel, 20, 12, 32, 2, 2), partial(tokens, 2, 12, 20)),
    ),
    "mlp": Network(
        "MLP, 784-1024-1024-10, 64 vectors, Adam",
        partial(mlp, (784, 1024, 1024, 10)),
        partial(vectors, 64, 784, 10),
        F.cross_entropy,
        *_ADAM,
        small=(partial(mlp, (20, 16, 16, 5)), partial(vectors, 6, 20, 5)),
    ),
}
"""The twelve, and three that take a step in a few milliseconds."""
