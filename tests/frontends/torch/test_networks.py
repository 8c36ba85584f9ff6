"""Small networks of the usual kinds: values and gradients equal eager's, and which operators they become."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontends.torch.check import check, double, operators


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)), torch.randn(5, 6)


class Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        short = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.short = short if stride > 1 else None

    def forward(self, x):
        y = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    stem = nn.Sequential(
        nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )
    body = nn.Sequential(
        stem, Residual(4, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    return body, torch.randn(2, 3, 16, 16)


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, fused: bool, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.fused, self.causal = heads, fused, causal

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)
            if self.causal:
                future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, float("-inf"))
            y = F.dropout(scores.softmax(-1), 0.0, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, pre: bool, fused: bool, causal: bool, approximate: str) -> None:
        super().__init__()
        self.attention, self.pre = Attention(d, heads, fused, causal), pre
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.feed = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(approximate=approximate), nn.Linear(2 * d, d))

    def forward(self, x):
        if self.pre:
            x = x + self.attention(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class Transformer(nn.Module):
    def __init__(self, *options) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(8, 2, *options) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.channels = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return (x + self.channels(self.norm2(x))).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wx, self.wh, self.out = nn.Embedding(9, 4), nn.Linear(4, 20), nn.Linear(5, 20), nn.Linear(5, 9)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = c = x.new_zeros(tokens.shape[0], 5)
        results = []
        for step in range(tokens.shape[1]):
            i, f, g, o = (self.wx(x[:, step]) + self.wh(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            results.append(h)
        return self.out(torch.stack(results, 1))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(10, 4, mode=mode) for mode in ("sum", "mean", "sum")])
        self.bottom, self.top = nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(10, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, x, indices):
        b = self.bottom(x)
        features = torch.stack([b] + [bag(i) for bag, i in zip(self.bags, indices.unbind(0), strict=True)], 1)
        dots = features @ features.transpose(1, 2)
        return self.top(torch.cat([b, dots[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mark = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 5, 8))
        self.block, self.head = Block(8, 2, True, True, False, "none"), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.mark.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.head(self.block(x)[:, 0])


def tokens() -> torch.Tensor:
    return torch.randint(0, 9, (2, 6))


def test_mlp() -> None:
    model, x = mlp()
    captured = check(double(model), x.double())
    assert operators(captured) == [
        "permute",
        "matmul",
        "add",
        "gelu_erf",
        "layer_norm",
        "permute",
        "matmul",
        "add",
    ]


def test_resnet() -> None:
    model, x = resnet()
    captured = check(double(model), x.double())
    assert not captured.fallbacks
    assert {"convolution", "batch_norm", "max_pool2d", "mean"} <= set(operators(captured))


def test_mobile_convolutions() -> None:
    layers = [nn.Conv2d(4, 8, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.Hardswish(), nn.SiLU(), nn.Conv1d]
    model = nn.Sequential(*layers[:-1], nn.AvgPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4))
    captured = check(double(model), torch.randn(2, 4, 8, 8).double())
    assert not captured.fallbacks


@pytest.mark.parametrize(
    "options", [(True, True, True, "tanh"), (False, True, False, "none"), (True, False, True, "none")]
)
def test_transformer(options: tuple) -> None:
    captured = check(double(Transformer(*options)), tokens())
    assert not captured.fallbacks
    assert ("attention" in operators(captured)) == options[1]


def test_library_transformer_layer() -> None:
    layer = double(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    captured = check(layer, torch.randn(2, 5, 8).double(), tolerance=1e-5)
    assert not captured.fallbacks


def test_mixer() -> None:
    assert not check(double(Mixer()), torch.randn(2, 3, 8, 8).double()).fallbacks


def test_recurrent_loop_slices_in_place_of_selecting() -> None:
    captured = check(double(Recurrent()), tokens())
    assert not captured.fallbacks and operators(captured).count("concat") == 1


def test_recommender() -> None:
    model = double(Recommender())
    assert not check(model, torch.randn(4, 5).double(), torch.randint(0, 10, (3, 4, 2))).fallbacks


def test_vision_transformer() -> None:
    assert not check(double(Vision()), torch.randn(2, 3, 8, 8).double()).fallbacks


LOSSES = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(x, t, weight=torch.arange(1.0, 5.0, dtype=x.dtype), ignore_index=1),
    "nll_sum": lambda x, t: F.nll_loss(x.log_softmax(-1), t, reduction="sum"),
    "images": lambda x, t: F.cross_entropy(x.view(2, 4, 3, 1), t.view(2, 3, 1)),
    "mse": lambda x, t: F.mse_loss(x, t[:, None].to(x.dtype).expand_as(x)),
    "l1": lambda x, t: F.l1_loss(x, t[:, None].to(x.dtype).expand_as(x)),
    "huber": lambda x, t: F.huber_loss(x, t[:, None].to(x.dtype).expand_as(x)),
    "smooth_l1": lambda x, t: F.smooth_l1_loss(x, t[:, None].to(x.dtype).expand_as(x), beta=0.5),
    "logits": lambda x, t: F.binary_cross_entropy_with_logits(x, (t[:, None] > 1).to(x.dtype).expand_as(x)),
    "bce": lambda x, t: F.binary_cross_entropy(x.sigmoid(), (t[:, None] > 1).to(x.dtype).expand_as(x)),
    "kl": lambda x, t: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    "cosine": lambda x, t: F.cosine_similarity(x, x.detach().flip(0)).sum(),
    "margin": lambda x, t: F.multi_margin_loss(x, t),
    "triplet": lambda x, t: F.triplet_margin_loss(x[:2], x[2:4], x[4:]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    check(lambda x: LOSSES[name](x, torch.tensor([0, 1, 2, 3, 1, 0])), x)


def test_channels_last_pooling_to_one_element_is_a_mean() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = double(model).to(memory_format=torch.channels_last)
    captured = check(model, torch.randn(2, 3, 8, 8).double().contiguous(memory_format=torch.channels_last))
    assert not captured.fallbacks
