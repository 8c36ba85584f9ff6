"""timm: forty architectures with random weights, each through two training steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.clients.way import Program, Way, vision

vision()

import timm  # noqa: E402 (it imports torchvision)

PACKAGE = "timm"
SMALL = {"num_classes": 5}
VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet10t": (64, {}),
    "resnet14t": (64, {}),
    "resnet18": (64, {}),
    "resnetblur18": (64, {}),
    "seresnet18": (64, {}),
    "resnext26ts": (64, {}),
    "ecaresnet26t": (64, {}),
    "res2net50_14w_8s": (64, {}),
    "resnest14d": (64, {}),
    "skresnet18": (64, {}),
    "densenet121": (64, {}),
    "dpn48b": (64, {}),
    "dla34": (64, {}),
    "hrnet_w18_small": (64, {}),
    "selecsls42b": (64, {}),
    "vovnet39a": (64, {}),
    "cspresnet50": (64, {}),
    "darknet17": (64, {}),
    "efficientnet_lite0": (64, {}),
    "mobilenetv2_035": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mnasnet_small": (64, {}),
    "ghostnet_050": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "repvgg_a0": (64, {}),
    "nf_regnet_b0": (64, {}),
    "hardcorenas_a": (64, {}),
    "tinynet_e": (64, {}),
    "lcnet_035": (64, {}),
    "convnext_atto": (64, {}),
    "convnextv2_atto": (64, {}),
    "poolformer_s12": (64, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "levit_128s": (224, {}),
    "vit_tiny_patch16_224": (32, VIT),
    "deit_tiny_patch16_224": (32, VIT),
    "mixer_s32_224": (64, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)},
    ),
}
"""Architecture -> the size of its images, and how it is made small."""


def network(name: str, way: Way) -> None:
    """Two steps, then an evaluation; in float64, since normalization over few samples amplifies rounding."""
    size, small = NETWORKS[name]
    torch.manual_seed(1)
    result = timm.create_model(name, pretrained=False, **SMALL, **small).double()
    for module in result.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for probability in ("drop_prob", "drop_rate"):  # of whole branches, `DropPath`, and of calls of `F.dropout`
            if hasattr(module, probability):
                setattr(module, probability, 0.0)
    net = way.optimize(result)  # changed
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, y = (
            torch.randn(4, 3, size, size, generator=generator).double(),
            torch.randint(0, 5, (4,), generator=generator),
        )
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        way.note("loss", loss)
    with torch.no_grad():
        way.note("evaluated", net.eval()(x))


PROGRAMS: dict[str, Program] = {name: partial(network, name) for name in NETWORKS}
