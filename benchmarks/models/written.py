"""Architectures written out here, of kinds that libraries and papers have: what is not a transformer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.library import classes
from benchmarks.models.model import Batch, Model


class SqueezeExcitation(nn.Module):
    """Channels weighted by a small network of their means (Hu et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class GhostNet(nn.Module):
    """Depthwise, grouped, shuffled and dilated convolutions, concatenation, and hard activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.primary = nn.Conv2d(8, 8, 1)
        self.cheap = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 2, dilation=2, groups=8), nn.BatchNorm2d(8), nn.PReLU(8))
        self.excitation = SqueezeExcitation(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding="same", groups=4, padding_mode="reflect")
        self.shuffle, self.norm = nn.ChannelShuffle(4), nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([self.primary(x), self.cheap(x)], 1)
        x = self.norm(self.shuffle(self.grouped(self.excitation(x))))
        x = F.max_pool2d(F.leaky_relu(x, 0.1), 2, ceil_mode=True) + F.avg_pool2d(x, 2)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), y, label_smoothing=0.1)


class DenseNet(nn.Module):
    """Every layer reads all those before it (Huang et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * i) for i in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, 1, 1, bias=False) for i in range(4))
        self.stem, self.head = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(24, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            parts.append(conv(F.relu(norm(torch.cat(parts, 1)))))
        return F.cross_entropy(self.head(torch.cat(parts, 1).amax((2, 3))), y)


class Diffusion(nn.Module):
    """A U-Net with time embedding, group norms, attention, and skip connections (Ho et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.enter, self.down = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.norm, self.middle = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, 1, 1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.leave = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.Conv2d(32, 3, 3, 1, 1)

    def forward(self, x: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        level = torch.cos(step.to(x.dtype) / 100 * math.pi / 2)[:, None, None, None]
        noisy = level * x + (1 - level.square()).clamp_min(1e-4).sqrt() * noise
        angle = step.to(x.dtype)[:, None] * torch.exp(-torch.arange(8, dtype=x.dtype) * (math.log(1e4) / 8))
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        first = self.enter(noisy)
        low = self.down(first) + time[:, :, None, None]
        low = low + self.middle(F.silu(self.norm(low)))
        tokens = low.flatten(2).transpose(1, 2)
        mixed = (tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]).transpose(1, 2)
        both = self.up(torch.cat([low, mixed.reshape(low.shape)], 1))
        smooth = F.interpolate(F.avg_pool2d(both, 2), scale_factor=2, mode="bilinear", align_corners=False)
        return F.mse_loss(self.leave(torch.cat([smooth, first], 1)), noise)


class Autoencoder(nn.Module):
    """A variational autoencoder (Kingma and Welling, 2014), its noise an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(512, 12))
        self.decoder = nn.Sequential(
            nn.Linear(6, 512),
            nn.Softplus(),
            nn.Unflatten(1, (8, 8, 8)),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 1, 3, 1, 1),
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        spread = spread.clamp(-5, 5)
        found = self.decoder(mean + noise * torch.exp(0.5 * spread))
        likelihood = F.binary_cross_entropy_with_logits(found, x.sigmoid(), reduction="sum")
        return (likelihood + 0.5 * (mean.square() + spread.exp() - 1 - spread).sum()) / len(x)


class Flow(nn.Module):
    """Affine couplings, a permutation, and an invertible matrix (Kingma and Dhariwal, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0].contiguous())
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for net in self.nets:
            x = x[:, self.order] @ self.weight
            total = total + torch.linalg.slogdet(self.weight)[1]
            a, b = x.split(4, 1)
            shift, scale = net(a).unflatten(1, (2, 4)).unbind(1)
            scale = torch.tanh(scale)
            x, total = torch.cat([b * scale.exp() + shift, a], 1), total + scale.sum(1)
        return (0.5 * x.square().sum(1) + 4 * math.log(2 * math.pi) - total).mean()


class GraphConvolution(nn.Module):
    """Messages along edges, summed, averaged and maximized at their ends; attention over a node's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.message, self.update = nn.Linear(6, 16), nn.Linear(33, 16), nn.GRUCell(16, 16)
        self.score, self.head = nn.Linear(32, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        source, target = edges
        h = self.embed(x).relu()
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, target, torch.ones_like(weights)).clamp(min=1)
        for _ in range(2):
            pair = torch.cat([h[source], h[target]], 1)
            score = F.leaky_relu(self.score(pair), 0.2).squeeze(1)
            top = torch.full((len(x),), -1e9, dtype=x.dtype).scatter_reduce(0, target, score.detach(), "amax")
            share = (score - top[target]).exp()
            share = share / torch.zeros_like(degree).scatter_add(0, target, share)[target]
            message = self.message(torch.cat([pair, weights[:, None]], 1)) * share[:, None]
            total = torch.zeros_like(h).index_add_(0, target, message) / degree.sqrt()[:, None]
            h = self.update(total, h)
        return F.cross_entropy(self.head(torch.cat([h, h.mean(0).expand_as(h)], 1)), y)


class Recurrent(nn.Module):
    """Stacked LSTM and bidirectional GRU, with attention over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, 2, batch_first=True)
        self.gru = nn.GRU(16, 8, bidirectional=True, batch_first=True)
        self.query, self.head = nn.Parameter(torch.randn(16)), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found, _ = self.gru(self.lstm(self.embedding(x))[0])
        weights = (found @ self.query).masked_fill(x == 0, -1e9).softmax(1)
        return F.cross_entropy(self.head(torch.einsum("bt,btd->bd", weights, found)), y)


class Transformer(nn.Module):
    """PyTorch's own encoder and decoder layers, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16, max_norm=None), nn.LayerNorm(16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1] - 1)
        found = self.transformer(self.embedding(x), self.embedding(y[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(self.norm(found)).transpose(1, 2), y[:, 1:], ignore_index=0)


class Adversarial(nn.Module):
    """Spectral normalization, transposed convolutions, instance normalization and a hinge loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generate = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )
        self.judge = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))
        nn.utils.parametrizations.weight_norm(self.judge[0])

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        result = self.generate(noise[:, :, None, None]).tanh()
        return F.relu(1 - self.judge(real)).mean() + F.relu(1 + self.judge(result)).mean()


class Contrastive(nn.Module):
    """Two views, normalized, every pair compared; an average of the weights without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.temperature = nn.Parameter(torch.tensor(2.0))
        for parameter in self.target.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        a = F.normalize(self.online(x + noise), dim=1)
        with torch.no_grad():
            b = F.normalize(self.target(x - noise), dim=1)
        scores = a @ b.T * self.temperature.exp().clamp(max=100)
        label = torch.arange(len(x))
        return (F.cross_entropy(scores, label) + F.cross_entropy(scores.T, label)) / 2


class Physics(nn.Module):
    """A network of coordinates with Fourier features, and quantiles of its errors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8))
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        angle = 2 * math.pi * x @ self.frequencies
        h = torch.cat([angle.sin(), angle.cos()], -1)
        for layer in self.layers[:-1]:
            h = torch.sin(layer(h)) + h
        error = y[:, None] - self.layers[-1](h)
        level = torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype)
        return torch.maximum(level * error, (level - 1) * error).mean() + F.smooth_l1_loss(h.norm(dim=1), y)


def _pictures(channels: int = 3, size: int = 16) -> Tensor:
    return torch.randn(4, channels, size, size)


def _labeled() -> Batch:
    return {"x": _pictures(), "y": classes(batch=4)}


def _graph() -> Batch:
    return {
        "x": torch.randn(10, 6),
        "edges": torch.randint(0, 10, (2, 30)),
        "weights": torch.rand(30),
        "y": torch.randint(0, 4, (10,)),
    }


def _itself(loss: Tensor) -> Tensor:
    return loss


WRITTEN: tuple[Model, ...] = (
    Model("ghostnet", GhostNet, _labeled, _itself),
    Model("densenet", DenseNet, _labeled, _itself),
    Model(
        "diffusion",
        Diffusion,
        lambda: {"x": _pictures(), "noise": _pictures(), "step": torch.randint(0, 100, (4,))},
        _itself,
    ),
    Model("vae", Autoencoder, lambda: {"x": _pictures(1), "noise": torch.randn(4, 6)}, _itself, rate=1e-4),
    Model("flow", Flow, lambda: {"x": torch.randn(6, 8)}, _itself, rate=1e-3),
    Model("graph-convolution", GraphConvolution, _graph, _itself),
    Model("recurrent", Recurrent, lambda: {"x": torch.randint(0, 20, (4, 6)), "y": classes(batch=4)}, _itself),
    Model(
        "transformer",
        Transformer,
        lambda: {"x": torch.randint(1, 20, (3, 7)), "y": torch.randint(0, 20, (3, 6))},
        _itself,
    ),
    Model("adversarial", Adversarial, lambda: {"noise": torch.randn(4, 8), "real": torch.randn(4, 1, 8, 8)}, _itself),
    Model("contrastive", Contrastive, lambda: {"x": torch.randn(8, 8), "noise": 0.1 * torch.randn(8, 8)}, _itself),
    Model("physics", Physics, lambda: {"x": torch.rand(12, 2), "y": torch.rand(12)}, _itself),
)
"""Each returns its loss."""
