"""Operators written as expressions: none of them has a derivative written by hand."""

from __future__ import annotations

from daceml_train import expression
from daceml_train.expressions import (
    array,
    elu,
    exp,
    floor,
    largest,
    logsumexp,
    sigmoid,
    size,
    sqrt,
    tanh,
    to_float,
    total,
    where,
)


@expression
def capsule(x, w, stride=2, pad=1):  # EM capsules: a convolution of K x J pose matrices
    B, C, H, W, I, K = x.shape
    O, _, R, S, _, J = w.shape
    P, Q = (H + 2 * pad - R) // stride + 1, (W + 2 * pad - S) // stride + 1
    return array(
        total(
            x.outside(0)[b, c, p * stride + r - pad, q * stride + s - pad, i, k] * w[o, c, r, s, k, j]
            for c in C
            for r in R
            for s in S
            for k in K
        )
        for b in B
        for o in O
        for p in P
        for q in Q
        for i in I
        for j in J
    )


@expression
def shift(x, dy, dx):  # ShiftNet: every channel moves by its own (data-dependent) offset
    B, C, H, W = x.shape
    return array(x.outside(0)[b, c, h + dy[c], w + dx[c]] for b in B for c in C for h in H for w in W)


@expression
def correlate(f, g, radius=4):  # FlowNet: cost volume of two feature maps
    B, C, H, W = f.shape
    D = size(2 * radius + 1)
    return array(
        total(f[b, c, h, w] * g.outside(0)[b, c, h + i - radius, w + j - radius] for c in C)
        for b in B
        for i in D
        for j in D
        for h in H
        for w in W
    )


@expression
def involution(x, k):  # one kernel per pixel and group of channels: k[b, g, r, s, h, w]
    B, G, D, H, W = x.shape
    _, _, R, S, _, _ = k.shape
    return array(
        total(k[b, g, r, s, h, w] * x.outside(0)[b, g, d, h + r - R // 2, w + s - S // 2] for r in R for s in S)
        for b in B
        for g in G
        for d in D
        for h in H
        for w in W
    )


@expression
def local_attention(q, k, v, radius=3):  # stand-alone self-attention over windows
    B, N, D, H, W = q.shape
    R = size(2 * radius + 1)
    a = array(
        total(q[b, n, d, h, w] * k.outside(0)[b, n, d, h + r - radius, w + s - radius] for d in D)
        for b in B
        for n in N
        for r in R
        for s in R
        for h in H
        for w in W
    )
    norm = array(logsumexp(a[b, n, r, s, h, w] for r in R for s in R) for b in B for n in N for h in H for w in W)
    p = array(
        exp(a[b, n, r, s, h, w] - norm[b, n, h, w]) for b in B for n in N for r in R for s in R for h in H for w in W
    )
    return array(
        total(p[b, n, r, s, h, w] * v.outside(0)[b, n, d, h + r - radius, w + s - radius] for r in R for s in R)
        for b in B
        for n in N
        for d in D
        for h in H
        for w in W
    )


@expression
def bilinear(x, grid):  # grid_sample in pixels: grid[b, p, 0] down, grid[b, p, 1] right
    B, C, H, W = x.shape
    _, P, _ = grid.shape

    def at(b, c, y, u):
        return x.outside(0)[b, c, floor(y), floor(u)]

    def point(b, c, p):
        y, u = grid[b, p, 0], grid[b, p, 1]
        fy, fu = y - floor(y), u - floor(u)
        return (1 - fy) * ((1 - fu) * at(b, c, y, u) + fu * at(b, c, y, u + 1)) + fy * (
            (1 - fu) * at(b, c, y + 1, u) + fu * at(b, c, y + 1, u + 1)
        )

    return array(point(b, c, p) for b in B for c in C for p in P)


@expression
def mi_lstm(x, h, c, w, u, alpha, beta, gamma, bias):  # multiplicative integration; w[4, n, i], u[4, n, m]
    B, I = x.shape
    G, N, _ = w.shape
    _, M = h.shape
    wx = array(total(x[b, i] * w[g, n, i] for i in I) for b in B for g in G for n in N)
    uh = array(total(h[b, m] * u[g, n, m] for m in M) for b in B for g in G for n in N)
    z = array(
        alpha[g, n] * wx[b, g, n] * uh[b, g, n] + beta[g, n] * wx[b, g, n] + gamma[g, n] * uh[b, g, n] + bias[g, n]
        for b in B
        for g in G
        for n in N
    )
    c2 = array(sigmoid(z[b, 1, n]) * c[b, n] + sigmoid(z[b, 0, n]) * tanh(z[b, 2, n]) for b in B for n in N)
    return array(sigmoid(z[b, 3, n]) * tanh(c2[b, n]) for b in B for n in N), c2


@expression
def subspace_attention(x, dw, pw):  # ULSAM: per group: depthwise 1x1, 3x3 max, one map, softmax over it
    B, G, D, H, W = x.shape
    R = size(3)
    m = array(
        largest(dw[g, d] * x.clamp[b, g, d, h + r - 1, w + s - 1] for r in R for s in R)
        for b in B
        for g in G
        for d in D
        for h in H
        for w in W
    )
    a = array(total(pw[g, d] * m[b, g, d, h, w] for d in D) for b in B for g in G for h in H for w in W)
    norm = array(logsumexp(a[b, g, h, w] for h in H for w in W) for b in B for g in G)
    return array(
        x[b, g, d, h, w] * (1 + exp(a[b, g, h, w] - norm[b, g])) for b in B for g in G for d in D for h in H for w in W
    )


@expression
def deformable(x, off, w):  # deformable 1-D convolution: linear reads at learned positions
    B, C, T = x.shape
    O, _, K = w.shape

    def read(b, c, y):
        return (1 - (y - floor(y))) * x.outside(0)[b, c, floor(y)] + (y - floor(y)) * x.outside(0)[b, c, floor(y) + 1]

    return array(
        total(w[o, c, k] * read(b, c, off[b, k, t] + to_float(t + k - K // 2)) for c in C for k in K)
        for b in B
        for o in O
        for t in T
    )


@expression
def tropical(x, w):
    return array(largest(x[b, i] + w[o, i] for i in x.shape[1]) for b in x.shape[0] for o in w.shape[0])


@expression
def manhattan(x, y):
    return array(total(abs(x[i, d] - y[j, d]) for d in x.shape[1]) for i in x.shape[0] for j in y.shape[0])


@expression
def circulant(x, w):  # block-circulant product: w[o, (i - j) mod N]
    B, P, N = x.shape
    O = w.shape[0]
    return array(total(x[b, p, i] * w.wrap[o, p, i - j] for p in P for i in N) for b in B for o in O for j in N)


@expression
def ring_conv(x, w, dilation=2):  # convolution on a torus
    B, C, T = x.shape
    O, _, K = w.shape
    return array(
        total(x.wrap[b, c, t + dilation * k] * w[o, c, k] for c in C for k in K) for b in B for o in O for t in T
    )


@expression
def pixel_shuffle(x):  # a permutation: its adjoint must be a pure gather
    B, C, H, W = x.shape
    return array(
        tanh(x[b, c * 4 + 2 * (h % 2) + w % 2, h // 2, w // 2]) for b in B for c in C // 4 for h in 2 * H for w in 2 * W
    )


@expression
def strided_lse(x, s=3):
    return array(logsumexp(x[b, s * t + k] for k in size(5)) for b in x.shape[0] for t in (x.shape[1] - 5) // s + 1)


@expression
def diagonal_gate(x, y):
    return array(x[i, i] * sigmoid(y[i, j]) + y[j, i] for i in x.shape[0] for j in x.shape[0])


@expression
def causal_decay(x, a):  # y[t] = sum over s <= t of exp(-(t-s) a) x[s]
    B, T = x.shape
    return array(
        total(exp(where(s <= t, 0.0 - a[b] * to_float(t - s), -1e4)) * x[b, s] for s in T) for b in B for t in T
    )


@expression
def embed_sum(table, ids):
    return array(total(table[ids[b, k], d] for k in ids.shape[1]) for b in ids.shape[0] for d in table.shape[1])


@expression
def sparse_stride(x, w):  # stride 3 with a kernel of 2: holes, where the gradient is zero
    B, T = x.shape
    K = w.shape[0]
    return array(total(x[b, 3 * t + k] * w[k] for k in K) for b in B for t in (T - K) // 3 + 1)


@expression
def lltm(x, h, c, w, u, bias):  # the cell of PyTorch's tutorial on extensions: w[3, n, i], u[3, n, m]
    B, N = h.shape
    z = array(
        total(x[b, i] * w[g, n, i] for i in x.shape[1]) + total(h[b, m] * u[g, n, m] for m in N) + bias[g, n]
        for b in B
        for g in size(3)
        for n in N
    )
    new = array(c[b, n] + sigmoid(z[b, 0, n]) * elu(z[b, 2, n]) for b in B for n in N)
    return array(tanh(new[b, n]) * sigmoid(z[b, 1, n]) for b in B for n in N), new


@expression
def scrnn(x, h, s, b, p, a, r, alpha=0.95):  # structurally constrained: a context `s` that changes slowly
    B, C = s.shape
    context = array((1 - alpha) * total(x[n, i] * b[c, i] for i in x.shape[1]) + alpha * s[n, c] for n in B for c in C)
    z = array(
        total(context[n, c] * p[k, c] for c in C)
        + total(x[n, i] * a[k, i] for i in x.shape[1])
        + total(h[n, m] * r[k, m] for m in h.shape[1])
        for n in B
        for k in h.shape[1]
    )
    return array(sigmoid(z[n, k]) for n in B for k in h.shape[1]), context


@expression
def sub_lstm(x, h, c, w, u, bias):  # gates that subtract: w[4, n, i], u[4, n, m]
    B, N = h.shape
    z = array(
        sigmoid(total(x[b, i] * w[g, n, i] for i in x.shape[1]) + total(h[b, m] * u[g, n, m] for m in N) + bias[g, n])
        for b in B
        for g in size(4)
        for n in N
    )
    new = array(z[b, 3, n] * c[b, n] + z[b, 2, n] - z[b, 0, n] for b in B for n in N)
    return array(sigmoid(new[b, n]) - z[b, 1, n] for b in B for n in N), new


@expression
def routing(votes, rounds=3):  # dynamic routing between capsules: votes[b, i, o, d]
    B, I, O, D = votes.shape
    agreed = None
    for _ in range(rounds):
        agreed, squashed = _route(votes, agreed, B, I, O, D)
    return squashed


def _route(votes, agreed, B, I, O, D):
    if agreed is None:
        s = array(total(votes[b, i, o, d] / int(O) for i in I) for b in B for o in O for d in D)
    else:
        norm = array(logsumexp(agreed[b, i, o] for o in O) for b in B for i in I)
        s = array(
            total(exp(agreed[b, i, o] - norm[b, i]) * votes[b, i, o, d] for i in I) for b in B for o in O for d in D
        )
    n = array(total(s[b, o, d] * s[b, o, d] for d in D) for b in B for o in O)
    v = array(s[b, o, d] * sqrt(n[b, o] + 1e-8) / (1 + n[b, o]) for b in B for o in O for d in D)
    more = array(total(votes[b, i, o, d] * v[b, o, d] for d in D) for b in B for i in I for o in O)
    return (more if agreed is None else array(agreed[b, i, o] + more[b, i, o] for b in B for i in I for o in O)), v


@expression
def channel_shuffle(x, groups=4):  # ShuffleNet: channels of all groups take turns
    B, C, H, W = x.shape
    return array(x[b, c % groups * (C // groups) + c // groups, h, w] for b in B for c in C for h in H for w in W)
