"""Models in the way people write their own: loops, caches, routing, norms of weights, derivatives within."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.models.model import Batch, Model


class Mixture(nn.Module):
    """Experts after a router that sends each token to its two best ones, with a loss that balances them."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        weight, chosen = chances.topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        places = F.one_hot(chosen, chances.shape[-1]).to(x.dtype)
        share = (places * weight[..., None]).sum(-2)
        hidden = F.gelu(torch.einsum("btd,edh->beth", x, self.up))
        result = torch.einsum("beth,ehd,bte->btd", hidden, self.down, share)
        balance = (places.sum(-2).mean((0, 1)) * chances.mean((0, 1))).sum()
        return (result - x).square().mean() + 0.01 * balance


class Experts(nn.Module):
    """Experts that each take the tokens that were sent to them, by masks."""

    def __init__(self, width: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            results[mine] = expert(x[mine]) * weight[mine].unsqueeze(-1)
        return results.square().mean()


class UNet(nn.Module):
    """Down, up by interpolation to the size of what is concatenated, sizes that are not even."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(1, channels), self._block(channels, 2 * channels)])
        self.middle = self._block(2 * channels, 2 * channels)
        self.up = nn.ModuleList([self._block(4 * channels, channels), self._block(2 * channels, channels)])
        self.head = nn.Conv2d(channels, 3, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.LeakyReLU(0.1, True))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            other = kept.pop()
            x = F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([x, other], 1))
        return F.cross_entropy(self.head(x), y, ignore_index=255)


class Decoder(nn.Module):
    """Causal attention a token at a time over keys and values kept so far, as in generation, trained through."""

    def __init__(self, words: int = 20, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(words, width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        keys: Tensor | None = None
        values: Tensor | None = None
        token, losses = x[:, 0], []
        for place in range(1, x.shape[1]):
            h = self.norm(self.embed(token))
            q, k, v = self.qkv(h).view(len(x), 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            keys = k if keys is None else torch.cat([keys, k], 2)
            values = v if values is None else torch.cat([values, v], 2)
            read = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).reshape(len(x), -1)
            scores = (h + self.out(read)) @ self.embed.weight.t()
            losses.append(F.cross_entropy(scores, x[:, place]))
            token = x[:, place] if place % 2 else scores.argmax(-1)
        return torch.stack(losses).mean()


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.rnn = getattr(nn, kind)(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.cross_entropy(self.head(out.sum(1) / lengths[:, None]), y)


class Normed(nn.Module):
    """Weight norm, spectral norm, an orthogonal matrix, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(8, 12))
        self.b = parametrizations.spectral_norm(nn.Conv1d(3, 3, 3, padding=1))
        self.c = parametrizations.orthogonal(nn.Linear(12, 12))
        self.d = nn.Linear(12, 12)
        self.shared = nn.Parameter(0.3 * torch.randn(8, 12))
        self.e = nn.Linear(12, 12, bias=False)
        self.e.weight = self.d.weight = nn.Parameter(0.3 * torch.randn(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = self.b(h) + self.c(h)
        h = F.linear(self.d(h), self.e.weight)
        return (h @ self.shared.t() - x).abs().mean()


class Triplet(nn.Module):
    """One encoder on three inputs; a margin, cosines, and the hardest negative of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.PReLU(), nn.Linear(16, 4))

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        a, p, n = (F.normalize(self.encoder(x), dim=-1) for x in (anchor, positive, negative))
        distances = torch.cdist(a, n) + 10 * torch.eye(len(a), dtype=a.dtype)
        hardest = n[distances.detach().argmin(1)]
        own = F.triplet_margin_loss(a, p, hardest, margin=0.5)
        target = torch.ones(len(a), dtype=a.dtype)
        return own + F.cosine_embedding_loss(a, p, target) + F.margin_ranking_loss(a[:, 0], n[:, 0], target, margin=0.1)


class _FixedPoint(torch.autograd.Function):
    """`z = tanh(z W + x)` by iteration; its gradient by the implicit function theorem, by iteration as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(30):
            z = torch.tanh(z @ weight + x)
        ctx.save_for_backward(z, weight)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z, weight = ctx.saved_tensors
        slope = 1 - z * z
        u = grad
        for _ in range(30):
            u = grad + (u * slope) @ weight.t()
        return u * slope, z.t() @ (u * slope)


class Equilibrium(nn.Module):
    """A layer that is the fixed point of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 2)
        self.weight = nn.Parameter(0.05 * torch.randn(8, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fixed: Tensor = _FixedPoint.apply(self.into(x), self.weight)
        return F.mse_loss(self.out(fixed), y)


class Messages(nn.Module):
    """A graph attention network: softmax over the edges into each node, by scatters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)
        self.update, self.head = nn.GRUCell(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        source, target = edges
        for _ in range(2):
            h = self.project(x)
            score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)).squeeze(-1), 0.2)
            most = torch.full((len(x),), -torch.inf, dtype=x.dtype).scatter_reduce(0, target, score, "amax")
            share = (score - most[target].detach()).exp()
            total = torch.zeros(len(x), dtype=x.dtype).index_add(0, target, share)
            messages = h[source] * (share / total[target]).unsqueeze(-1)
            x = self.update(torch.zeros_like(h).index_add(0, target, messages), x)
        pooled = torch.zeros(int(y.shape[0]), x.shape[-1], dtype=x.dtype)
        pooled.scatter_add_(0, graph[:, None].expand_as(x), x)
        return F.nll_loss(self.head(pooled).log_softmax(-1), y)


class Memory(nn.Module):
    """State from call to call in buffers: a running mean, a queue written at a place, codes moved by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("queue", torch.randn(8, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        chosen = torch.cdist(z, self.codes).argmin(-1)
        quantized = z + (self.codes[chosen] - z).detach()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
            rows = (self.place + torch.arange(len(x))) % len(self.queue)
            self.queue[rows] = z
            self.place.add_(len(x)).remainder_(len(self.queue))
            hot = F.one_hot(chosen, len(self.codes)).to(z.dtype)
            fresh = hot.t() @ z / hot.sum(0).clamp_min(1)[:, None]
            self.codes.lerp_(torch.where(hot.sum(0)[:, None] > 0, fresh, self.codes), 0.1)
        scores = (quantized - self.mean) @ self.queue.clone().t()
        return scores.logsumexp(-1).mean() + F.mse_loss(z, quantized.detach())


class Fields(nn.Module):
    """A signed distance in Fourier features, whose gradient in space is part of the loss; sines as activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8))
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 1)])

    def _at(self, x: Tensor) -> Tensor:
        phase = x @ self.frequencies
        h = torch.cat([phase.sin(), phase.cos()], -1)
        return self.layers[1](torch.sin(3 * self.layers[0](h))).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        value = self._at(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value.abs().mean() + (slope.norm(dim=-1) - 1).square().mean()


def _itself(result: Tensor) -> Tensor:
    return result


def _graph() -> Batch:
    edges = torch.cat([torch.randint(0, 10, (2, 24)), torch.arange(10).expand(2, 10)], 1)
    return {"x": torch.randn(10, 8), "edges": edges, "graph": torch.arange(10) // 4, "y": torch.tensor([0, 2, 1])}


def _lengths() -> Batch:
    lengths = torch.tensor([3, 6, 4])
    words = torch.randint(1, 20, (3, 6)) * (torch.arange(6) < lengths[:, None])
    return {"x": words, "lengths": lengths, "y": torch.tensor([0, 3, 1])}


def _rows() -> Iterator[Model]:
    yield Model("mixture", Mixture, lambda: {"x": torch.randn(2, 6, 16)}, _itself)
    yield Model("experts", Experts, lambda: {"x": torch.randn(12, 16)}, _itself, "which expert gets which tokens")
    yield Model("unet", UNet, lambda: {"x": torch.randn(2, 1, 13, 18), "y": torch.randint(0, 3, (2, 13, 18))}, _itself)
    yield Model("decoder", Decoder, lambda: {"x": torch.randint(0, 20, (3, 5))}, _itself)
    yield Model("packed-lstm", lambda: Packed("LSTM"), _lengths, _itself, "how long each sequence is")
    yield Model("packed-gru", lambda: Packed("GRU"), _lengths, _itself, "how long each sequence is")
    yield Model("normed", Normed, lambda: {"x": torch.randn(4, 3, 8)}, _itself)
    yield Model(
        "triplet", Triplet, lambda: {name: torch.randn(6, 8) for name in ("anchor", "positive", "negative")}, _itself
    )
    yield Model("equilibrium", Equilibrium, lambda: {"x": torch.randn(5, 6), "y": torch.randn(5, 2)}, _itself)
    yield Model("messages", Messages, _graph, _itself)
    yield Model("memory", Memory, lambda: {"x": torch.randn(3, 6)}, _itself)
    yield Model("fields", Fields, lambda: {"x": torch.rand(12, 2)}, _itself)


UNUSUAL: tuple[Model, ...] = tuple(_rows())
"""Each returns its loss."""
