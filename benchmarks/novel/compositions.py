"""The same operators as a PyTorch user composes them today: what expressions are compared to."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def capsule(x, w, stride=2, pad=1):
    B, C, H, W, I, K = x.shape
    O, _, R, S, _, J = w.shape
    x = F.pad(x, (0, 0, 0, 0, pad, pad, pad, pad)).unfold(2, R, stride).unfold(3, S, stride)
    return torch.einsum("bcpqikrs,ocrskj->bopqij", x, w)


def shift(x, dy, dx):
    B, C, H, W = x.shape
    h = torch.arange(H)[None, :, None] + dy[:, None, None]
    w = torch.arange(W)[None, None] + dx[:, None, None]
    ok = ((h >= 0) & (h < H) & (w >= 0) & (w < W)).to(x.dtype)
    return x[:, torch.arange(C)[:, None, None], h.clamp(0, H - 1), w.clamp(0, W - 1)] * ok


def correlate(f, g, radius=4):
    B, C, H, W = f.shape
    D = 2 * radius + 1
    g = F.pad(g, (radius,) * 4)
    return torch.stack([(f * g[:, :, i : i + H, j : j + W]).sum(1) for i in range(D) for j in range(D)], 1).view(
        B, D, D, H, W
    )


def involution(x, k):
    B, G, D, H, W = x.shape
    R, S = k.shape[2:4]
    u = F.unfold(x.reshape(B, G * D, H, W), (R, S), padding=(R // 2, S // 2)).view(B, G, D, R, S, H, W)
    return (u * k.unsqueeze(2)).sum((3, 4))


def local_attention(q, k, v, radius=3):
    B, N, D, H, W = q.shape
    R = 2 * radius + 1

    def un(t):
        return F.unfold(t.reshape(B, N * D, H, W), R, padding=radius).view(B, N, D, R * R, H, W)

    a = torch.einsum("bndhw,bndrhw->bnrhw", q, un(k)).softmax(2)
    return torch.einsum("bnrhw,bndrhw->bndhw", a, un(v))


def bilinear(x, grid):
    B, C, H, W = x.shape
    size = torch.tensor([W - 1, H - 1], dtype=x.dtype)
    return F.grid_sample(x, grid.flip(-1)[:, :, None] * 2 / size - 1, align_corners=True)[..., 0]


def mi_lstm(x, h, c, w, u, alpha, beta, gamma, bias):
    wx, uh = F.linear(x, w.flatten(0, 1)), F.linear(h, u.flatten(0, 1))
    z = alpha.flatten() * wx * uh + beta.flatten() * wx + gamma.flatten() * uh + bias.flatten()
    i, f, g, o = z.chunk(4, 1)
    c2 = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c2.tanh(), c2


def subspace_attention(x, dw, pw):
    B, G, D, H, W = x.shape
    m = F.max_pool2d(F.pad((dw[None, :, :, None, None] * x).flatten(1, 2), (1,) * 4, mode="replicate"), 3, 1).view_as(x)
    a = (pw[None, :, :, None, None] * m).sum(2).flatten(2).softmax(-1).view(B, G, 1, H, W)
    return x + x * a


def deformable(x, off, w):
    B, C, T = x.shape
    O, _, K = w.shape
    y = off + (torch.arange(T)[None] + torch.arange(K)[:, None] - K // 2).to(x.dtype)
    f = y.detach().floor()

    def at(i):
        i = i.long()
        ok = ((i >= 0) & (i < T)).to(x.dtype)
        return torch.gather(x, 2, i.clamp(0, T - 1).view(B, 1, -1).expand(B, C, -1)).view(B, C, K, T) * ok[:, None]

    return torch.einsum("bckt,ock->bot", (1 - (y - f))[:, None] * at(f) + (y - f)[:, None] * at(f + 1), w)


def tropical(x, w):
    return (x[:, None] + w[None]).amax(-1)


def manhattan(x, y):
    return (x[:, None] - y[None]).abs().sum(-1)


def circulant(x, w):
    N = x.shape[2]
    return torch.einsum("bpi,opij->boj", x, w[:, :, (torch.arange(N)[:, None] - torch.arange(N)[None]) % N])


def ring_conv(x, w, dilation=2):
    return F.conv1d(F.pad(x, (0, dilation * (w.shape[2] - 1)), mode="circular"), w, dilation=dilation)


def pixel_shuffle(x):
    return F.pixel_shuffle(x, 2).tanh()


def strided_lse(x, s=3):
    return x.unfold(1, 5, s).logsumexp(-1)


def diagonal_gate(x, y):
    return x.diagonal()[:, None] * y.sigmoid() + y.T


def causal_decay(x, a):
    t = torch.arange(x.shape[1])
    d = (t[:, None] - t[None]).to(x.dtype)
    return torch.einsum("bts,bs->bt", torch.exp(-a[:, None, None] * d.clamp(min=0)) * (d >= 0), x)


def embed_sum(table, ids):
    return table[ids].sum(1)


def sparse_stride(x, w):
    return x.unfold(1, w.shape[0], 3) @ w


def lltm(x, h, c, w, u, bias):
    z = (F.linear(x, w.flatten(0, 1)) + F.linear(h, u.flatten(0, 1)) + bias.flatten()).unflatten(1, w.shape[:2])
    i, o, g = z.unbind(1)
    new = c + i.sigmoid() * F.elu(g)
    return new.tanh() * o.sigmoid(), new


def scrnn(x, h, s, b, p, a, r, alpha=0.95):
    context = (1 - alpha) * F.linear(x, b) + alpha * s
    return (F.linear(context, p) + F.linear(x, a) + F.linear(h, r)).sigmoid(), context


def sub_lstm(x, h, c, w, u, bias):
    z = (F.linear(x, w.flatten(0, 1)) + F.linear(h, u.flatten(0, 1)) + bias.flatten()).unflatten(1, w.shape[:2])
    i, o, g, f = z.sigmoid().unbind(1)
    new = f * c + g - i
    return new.sigmoid() - o, new


def routing(votes, rounds=3):
    logits = torch.zeros(votes.shape[:3], dtype=votes.dtype)
    for _ in range(rounds):
        s = torch.einsum("bio,biod->bod", logits.softmax(2), votes)
        n = s.square().sum(-1, keepdim=True)
        v = s * (n + 1e-8).sqrt() / (1 + n)
        logits = logits + torch.einsum("biod,bod->bio", votes, v)
    return v


def channel_shuffle(x, groups=4):
    B, C, H, W = x.shape
    return x.view(B, groups, C // groups, H, W).transpose(1, 2).reshape(B, C, H, W)
