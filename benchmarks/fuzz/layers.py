# ruff: noqa: E501
"""Layers of random models, as text: each entry proposes lines for `__init__` and one statement that changes `h`.

A proposal may be wrong for the shape at hand; the generator executes it and drops what PyTorch refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.fuzz.drawing import Draw, Layer, _text
from benchmarks.fuzz.sizes import SELECTIONS, SIZES

UNARY = (
    "F.relu(h)",
    "torch.tanh(h)",
    "torch.sigmoid(h)",
    "F.gelu(h)",
    "F.gelu(h, approximate='tanh')",
    "F.silu(h)",
    "F.elu(h, 0.7)",
    "F.leaky_relu(h, 0.1)",
    "F.softplus(h)",
    "F.hardswish(h)",
    "F.relu6(h)",
    "h.abs()",
    "h.clamp(-0.7, 0.9)",
    "h.clamp(min=-0.2)",
    "h.exp().clamp(max=3.0)",
    "torch.log1p(h.abs())",
    "torch.sqrt(h * h + 0.1)",
    "torch.rsqrt(h.square() + 0.5)",
    "torch.sin(h)",
    "h.pow(2)",
    "h.pow(3) * 0.1",
    "-h",
    "h / (1 + h.abs())",
    "1.0 - h",
    "2 / (h.abs() + 1)",
    "F.mish(h)",
    "F.logsigmoid(h)",
    "F.hardsigmoid(h)",
    "F.hardtanh(h)",
    "h.erf()",
    "F.selu(h)",
    "F.softsign(h)",
    "h.atan()",
    "h.expm1().clamp(max=2.0)",
    "F.softshrink(h)",
    "h.double().sin().float()",
    "h.detach() * h",
    "F.celu(h)",
    "h.reciprocal().clamp(-2, 2)",
    "torch.logaddexp(h, -h)",
    "torch.hypot(h, h + 2)",
)
IN_PLACE = (
    "h = h * 1.0; h.relu_()",
    "h = h + 0; h.mul_(0.5)",
    "h = h.clone(); h[:, 0] = 0",
    "h = h.clone(); h[0] *= 2",
    "h = h * 2; h.add_(1.0).tanh_()",
    "h = h.clone(); h[..., 0] = h[..., -1] * 2",
    "h = h.clone(); h[..., ::2] *= 0.5",
    "h = h.clone(); h.sub_(h.mean())",
    "h = h + 1; h.clamp_(-1, 1)",
    "h = h * 1; h.select(-1, 0).add_(0.3)",
    "h = h * 1; h.transpose(0, -1).mul_(2.0)",
    "h = h * 1; h[:, :1].copy_(h[:, -1:] + 1)",
    "h = h * 1; h.view(-1)[::2].neg_()",
    "h = F.relu(h * 1, inplace=True)",
    "h = h.clone(); h.masked_fill_(h > 0.5, 0.1)",
    "h = h * 1; h += h.flip(-1)",
)
ALIASES = (
    "h = h * 1; h.detach().mul_(0.5)",
    "h = h * 1; h.data.clamp_(-1, 1)",
    "d = (h * 1).detach(); d.mul_(0.5); h = h + d",
    "h = h.clone().zero_() + h.mean()",
    "h = (h * 2).fill_(0.3) * h",
    "k = h * 1; h = k.view(-1); k.mul_(0.5); h = h.view(k.shape) + k",
    "k = h * 1; k[0].copy_(k[-1].clone()); h = k",
    "k = h * 2; h = k.T.mul_(0.5).T + k",
    "k = torch.zeros_like(h); torch.no_grad()(lambda a, b: a.add_(b.mean() * 2))(k, h); h = h * k",
    "k = torch.empty_like(h).copy_(h); k.squeeze_(); h = h + k.sum()",
    "h = h.contiguous(); k = h.unsqueeze(0); h = (k * 1).squeeze(0).sub_(k.detach()[0] * 0.5)",
    "k = h * 1; k.index_fill_(0, torch.tensor([0]), 0.1); h = k",
    "h = torch.stack([*(h * 1).unbind(0)]).add_(0.1)",
    "k = torch.no_grad()(lambda t: t * 2)(h); k.add_(h); h = k * 0.5",
    "k = h * 1; h = torch.no_grad()(lambda t: t.mul_(0.5))(k) + k; d = h * 1; d.detach_(); h = d * h + k",
)
"""Changes in place through other names of the same memory, where autograd sees them and where it does not."""
CONTROL = (
    "h = h * 2 if h.shape[0] > 2 else h - 1",
    "h = functools.reduce(lambda a, i: a.tanh() + i, range(3), h)",
    "h = [t for t in (h.relu(), -h) if t.dim()][-1]",
    "h = {True: torch.tanh, False: torch.sigmoid}[h.dim() == 3](h)",
    "h = h.relu() if h.sum() > 0 else -h",
    "h = h * (0.5 if float(h.detach().abs().max()) > 0.5 else 2.0)",
    "h = h[h.flatten(1).sum(1) > -1e9]",
    "h = h / max(1, int(h.detach().abs().max()))",
    "h = h * next(i for i in range(1, 9) if i > h.detach().abs().mean())",
    "h = torch.where(h > 0, h, 0.1 * h) if bool((h > 0).any()) else h",
    "h = h.index_select(0, torch.nonzero(h.flatten(1).sum(1) > -1e9)[:, 0])",
)
"""Python's control flow, half of it on what tensors hold."""
DERIVATIVES = (
    "h = torch.utils.checkpoint.checkpoint(lambda t: t.tanh() * t, h, use_reentrant=False)",
    "h = torch.utils.checkpoint.checkpoint(lambda t: t.sin() + t, h, use_reentrant=True)",
    "h = torch.func.grad(lambda t: (t.sin() * h).sum())(h)",
    "h = torch.func.vmap(lambda r: r.tanh() * r.sum())(h)",
    "h = torch.func.jvp(torch.sin, (h,), (h * 0.5,))[1]",
    "h = Straight.apply(h)",
    "h = Twice.apply(h, 0.5)",
    "h = h + (h.round() - h).detach()",
    "h = torch.func.vmap(torch.func.grad(lambda r: (r.square() * 0.5).sum()))(h)",
    "h = h.double().mul(0.3).float()",
    "h = h * (h > 0).long()",
    "h = h + h.argmax({d}, keepdim=True)",
    "h = h * (h.detach() * 2).floor().int()",
)
"""Derivatives inside models, functions with derivatives of their own, other element types."""
FALLBACKS = (
    "torch.fft.ifft(torch.fft.fft(h) * torch.fft.fft(h.flip(-1)) + torch.fft.fft(h)).real",
    "z = torch.complex(h, h.tanh()); h = torch.view_as_real(z * z + z.conj()).sum(-1) / (1 + z.abs())",
    "z = torch.fft.rfft(h); z[..., 0] = 0; h = torch.fft.irfft(z + z.detach(), n=h.shape[-1])",
    "h = h * 1; h.register_hook(lambda g: g * 0.5)",
    "h.cumsum({d})",
    "h.flip({d})",
    "h.roll(1, {d})",
    "h.sort({d}).values",
    "h.topk(1, {d}).values",
    "torch.cumprod(h.tanh() + 1.5, {d})",
    "h.gather({d}, h.argsort({d}))",
    "h.index_select({d}, torch.tensor([0, 0]))",
    "h.kthvalue(1, {d}, keepdim=True).values",
    "h.median({d}, keepdim=True).values",
    "h.logcumsumexp({d})",
    "h.tril()",
    "h.triu(1)",
    "h.unfold({d}, 2, 1)",
    "h.repeat_interleave(2, {d})",
    "F.normalize(h, dim={d})",
    "torch.tile(h, (2,))",
    "h.diff(dim={d})",
    "h.movedim({d}, 0)",
    "h.renorm(2, 0, 1.0)",
    "h.diagonal(0, -1, -2)",
    "torch.linalg.vector_norm(h + 3, dim={d}, keepdim=True)",
    "h.prod({d}, keepdim=True)",
    "F.interpolate(h, scale_factor=2)",
    "F.pad(h, (1, 2))",
    "F.pad(h, (0, 1, 1, 0), value=0.5)",
    "F.pad(h, (1, 1), mode='reflect')",
    "F.pad(h, (-1, 0))",
    "F.glu(h, {d})",
    "F.pixel_shuffle(h, 2)",
    "torch.cdist(h, h + 1)",
    "h.scatter_add({d}, torch.zeros_like(h, dtype=torch.long), h)",
    "F.instance_norm(h)",
    "F.local_response_norm(h, 2)",
    "F.one_hot(h.argmax({d}), 8).float() + h.mean()",
)
REDUCTIONS = (
    "h - h.mean({d}, keepdim=True)",
    "h.sum({d})",
    "h.mean({d})",
    "h.mean({d}, keepdim=True)",
    "h.amax({d})",
    "h.max({d}).values",
    "h.min({d}, keepdim=True).values + h",
    "h.var({d}, keepdim=True) + h",
    "h.std({d}) + 1",
    "h.logsumexp({d})",
    "h * h.norm()",
    "h + h.sum()",
    "h / (h.square().sum({d}, keepdim=True) + 1)",
    "h.mean((0, -1), keepdim=True) + h",
    "h.sum((-1, -2))",
    "h - h.mean()",
    "h.amin({d}, keepdim=True) * h",
    "h.var((-1, -2), unbiased=False)",
    "h.sum({d}, keepdim=True).expand_as(h) * h",
    "h / h.detach().abs().amax({d}, keepdim=True).clamp(min=0.1)",
    "h.amax((-1, 0), keepdim=True) - h",
    "torch.var_mean(h, {d}, keepdim=True)[0] * torch.var_mean(h, {d}, keepdim=True)[1]",
    "(h > 0).float().mean({d}, keepdim=True) * h",
)
MOVEMENT = (
    "h.transpose({d}, {e})",
    "h.transpose(-1, -2).contiguous()",
    "h.flatten(1)",
    "h.flatten({d})",
    "h.unsqueeze({d})",
    "h.squeeze({d})",
    "h.select({d}, 0)",
    "h.select({d}, -1)",
    "torch.cat(h.chunk(2, {d})[::-1], {d})",
    "h.chunk(2, {d})[0]",
    "h.split(1, {d})[-1]",
    "torch.stack([h, h * 2], {d})",
    "torch.stack(h.unbind({d}), {e})",
    "torch.cat([h, h], {d})",
    "torch.cat([h, torch.ones_like(h)], {d})",
    "h.reshape(h.shape[0], -1)",
    "h.reshape(-1, h.shape[-1])",
    "h.unflatten(-1, (2, -1))",
    "h.unflatten(1, (-1, 2))",
    "h[..., ::2]",
    "h[:, 1:]",
    "h[..., 1:] - h[..., :-1]",
    "h[:, None]",
    "h[..., None] * h[..., None, :]",
    "h.permute([h.dim() - 1 - i for i in range(h.dim())])",
    "h.narrow({d}, 0, 1).expand_as(h)",
    "h.unsqueeze({d}).expand(*[2 if i == {d} % (h.dim() + 1) else -1 for i in range(h.dim() + 1)])",
    "h.view(-1).view_as(h)",
    "h.mT @ h",
    "h.sum(0, keepdim=True).expand(2, *h.shape[1:])",
    "sum(torch.split(h, [1, h.shape[{d}] - 1], {d})[1:])",
    "h.repeat(2, *[1] * (h.dim() - 1))",
    "torch.einsum('b...i,b...j->bij', h, h)",
    "h.swapaxes(0, 1)",
    "h.reshape(-1)",
    "h.T.reshape(h.shape)",
    "(lambda a, b: a * b.sigmoid())(*h.chunk(2, {d}))",
    "(lambda q, k: torch.cat([k * 2, q], {d}))(*h.split([1, h.shape[{d}] - 1], {d}))",
    "h[[0, 0, -1]]",
    "h[:, [0, 0]]",
    "h[h.new_tensor([0, 0]).long()]",
)
MASKS = (
    "h.masked_fill(h > 0.3, float('-inf')).softmax({d}).nan_to_num()",
    "torch.where(h > 0, h, 0.1 * h)",
    "torch.where(h.sum({d}, keepdim=True) > 0, h, -h)",
    "torch.maximum(h, h.mean({d}, keepdim=True))",
    "h.masked_fill(torch.ones(h.shape[-1], h.shape[-1], dtype=torch.bool).triu(1)[0], float('-inf')).softmax(-1)",
    "torch.minimum(h, -h)",
    "h * (h > 0)",
    "torch.where(h.isfinite(), h, torch.zeros(()))",
    "h.masked_fill(h < -0.5, 0)",
    "torch.lerp(h, h.tanh(), 0.3)",
    "torch.addcmul(h, h, h, value=0.2)",
    "h * torch.arange(h.shape[{d}]).add(1).view([-1 if i == {d} % h.dim() else 1 for i in range(h.dim())])",
    "h + torch.linspace(0, 1, h.shape[-1])",
    "F.dropout(h, 0.0)",
    "h.softmax({d})",
    "h.log_softmax({d})",
    "F.softmin(h, {d})",
    "(h * 3).softmax({d}) * h",
    "torch.where(torch.arange(h.shape[-1]) > 0, h, h.amax())",
)


def _residual(draw: Draw) -> Layer:
    first = draw.pick(
        *UNARY, "h.softmax(-1)", "h.mean(-1, keepdim=True)", "h.sum(0, keepdim=True)", "h.cumsum(-1)", "h.flip(0)"
    )
    return Layer(f"h = h {draw.pick('+', '*', '-')} ({first})")


def _skip(draw: Draw) -> Layer | None:
    name = draw.other()
    if name is None:
        return None
    same = draw.saved[name] == draw.shape
    joins = (
        f"h + {name}",
        f"{name} * h",
        f"h - {name}",
        f"torch.where({name} > 0, h, {name})",
        f"h / ({name}.abs() + 1)",
    )
    cat = f"torch.cat([h, {name}], {draw.dim()})"
    stack = f"torch.stack([{name}, h], {draw.dim()})" if same else cat
    return Layer(f"h = {draw.pick(*joins, cat, stack)}")


def _contract(draw: Draw) -> Layer | None:
    name = draw.other(lambda s: len(s) == len(draw.shape))
    if name is None:
        return None
    outer = f"torch.einsum('b...i,b...j->b...ij', h, {name})"
    return Layer(f"h = {draw.pick(f'h @ {name}.mT', f'h.mT @ {name}', outer, f'h @ {name}', f'(h * {name}).sum(-1)')}")


def _linear(draw: Draw) -> Layer:
    size = draw.random.choice([1, 2, 4, 5, 6, 8])
    options = draw.pick("", "", ", bias=False")
    wrap = draw.pick("{}", "{}", "h + {}.sum(-1, keepdim=True)", "F.relu({})", "{} * h.mean(-1, keepdim=True)")
    return Layer("h = " + wrap.format("self.l{n}(h)"), (f"self.l{{n}} = nn.Linear({draw.shape[-1]}, {size}{options})",))


def _shared(draw: Draw) -> Layer | None:
    fitting = [n for n, (i, _) in draw.linears.items() if i == draw.shape[-1]]
    turned = [n for n, (_, o) in draw.linears.items() if o == draw.shape[-1]]
    if fitting and (not turned or draw.random.random() < 0.5):
        return Layer(f"h = self.{draw.random.choice(fitting)}(h)")
    return Layer(f"h = F.linear(h, self.{draw.random.choice(turned)}.weight.t())") if turned else None


def _parameter(draw: Draw) -> Layer:
    shape = [s if draw.random.random() < 0.6 else 1 for s in draw.shape[draw.random.randrange(len(draw.shape)) :]]
    use = draw.pick(
        "h * self.p{n}",
        "h + self.p{n}",
        "self.p{n} - h",
        "h / (self.p{n}.exp() + 1)",
        "torch.where(h > self.p{n}, h, self.p{n})",
        "F.prelu(h, self.p{n}.flatten()[:1])",
    )
    return Layer(f"h = {use}", (f"self.p{{n}} = nn.Parameter(torch.randn({shape}) * 0.5)",))


def _conv(draw: Draw) -> Layer | None:
    rank = len(draw.shape) - 2
    if rank not in (1, 2):
        return None
    c = draw.shape[1]
    groups = draw.random.choice([g for g in (1, 1, 2, 3, c) if c % g == 0])
    out = groups * draw.random.choice([1, 2, 3])
    kernel, stride, pad, dilation = (draw.random.choice(x) for x in ([1, 2, 3], [1, 1, 2], [0, 1, 1, 2], [1, 1, 2]))
    bias = draw.pick("True", "True", "False")
    kind, mode = "Conv", draw.pick("", "", "", ", padding_mode='circular'", ", padding_mode='replicate'")
    if draw.random.random() < 0.12:
        kind, mode = "ConvTranspose", ""
    init = f"self.c{{n}} = nn.{kind}{rank}d({c}, {out}, {kernel}, {stride}, {pad}, dilation={dilation}, groups={groups}, bias={bias}{mode})"
    return Layer("h = self.c{n}(h)", (init,))


def _norm(draw: Draw) -> Layer | None:
    shape = draw.shape
    affine = draw.pick("True", "True", "False")
    options = [f"nn.LayerNorm({list(shape[-k:])}, elementwise_affine={affine})" for k in (1, 2) if k < len(shape)]
    options.append(f"nn.RMSNorm({shape[-1]})")
    if len(shape) in (2, 3):
        options += [
            f"nn.BatchNorm1d({shape[1]}, affine={affine}, momentum={draw.pick('0.1', '0.3', 'None')}, track_running_stats={draw.pick('True', 'True', 'False')})"
        ] * 2
    if len(shape) == 4:
        options += [f"nn.BatchNorm2d({shape[1]}, affine={affine})"] * 3
    if len(shape) >= 2:
        options += [f"nn.GroupNorm({g}, {shape[1]}, affine={affine})" for g in (1, 2) if shape[1] % g == 0]
    use = draw.pick("self.n{n}(h)", "self.n{n}(h)", "h + self.n{n}(h)", "self.n{n}(F.relu(h))")
    return Layer(f"h = {use}", (f"self.n{{n}} = {draw.random.choice(options)}",))


def _pool(draw: Draw) -> Layer | None:
    rank = len(draw.shape) - 2
    if rank not in (1, 2):
        return None
    options = [
        f"F.max_pool{rank}d(h, 2)",
        f"F.max_pool{rank}d(h, 3, 1, 1)",
        f"F.avg_pool{rank}d(h, 2)",
        f"F.avg_pool{rank}d(h, 3, 2, 1)",
        f"F.avg_pool{rank}d(h, 3, 2, 1, count_include_pad=False)",
        f"F.adaptive_avg_pool{rank}d(h, 1)",
        f"F.adaptive_avg_pool{rank}d(h, 2)",
        f"F.max_pool{rank}d(h, 2, ceil_mode=True)",
        f"F.avg_pool{rank}d(h, 2, ceil_mode=True)",
        f"F.adaptive_max_pool{rank}d(h, 2)",
        f"F.max_pool{rank}d(h, 2, dilation=2, padding=1)",
        f"F.adaptive_avg_pool{rank}d(h, 3)",
    ]
    return Layer(f"h = {draw.pick(*options)}")


def _attention(draw: Draw) -> Layer | None:
    if len(draw.shape) != 3:
        return None
    d = draw.shape[-1]
    heads = draw.random.choice([h for h in (1, 2, 4) if d % h == 0])
    options = draw.pick(
        "",
        ", is_causal=True",
        ", attn_mask=torch.ones(h.shape[1], h.shape[1]).tril().bool()",
        ", attn_mask=h.mean(-1).diag_embed().unsqueeze(1)",
        ", scale=0.7",
    )
    if draw.random.random() < 0.3:
        return Layer(
            "h = self.m{n}(h, h, h, need_weights=False)[0]",
            (f"self.m{{n}} = nn.MultiheadAttention({d}, {heads}, batch_first=True)",),
        )
    turn = f"t.unflatten(-1, ({heads}, -1)).transpose(1, 2)"
    core = (
        f"F.scaled_dot_product_attention(q, k, v{options})"
        if draw.random.random() < 0.6
        else "((q @ k.mT) * 0.5).softmax(-1) @ v"
    )
    return Layer(
        f"q, k, v = [{turn} for t in self.q{{n}}(h).chunk(3, -1)]; h = {core}.transpose(1, 2).flatten(2)",
        (f"self.q{{n}} = nn.Linear({d}, {3 * d})",),
    )


def _buffer(draw: Draw) -> Layer:
    use = draw.pick(
        "self.b{n}.mul_(0.9).add_(h.detach().mean()); h = h * self.b{n}",
        "h = h + self.b{n}; self.b{n}.add_(1)",
        "self.b{n}.copy_(h.detach().amax()); h = h / (self.b{n}.abs() + 1)",
        "self.b{n} = self.b{n} * 0.5 + h.detach().mean(); h = h * self.b{n}",
        "torch.no_grad()(lambda a, b: a.lerp_(b, 0.3))(self.b{n}, h.mean()); h = h - self.b{n}",
    )
    return Layer(use, ("self.register_buffer('b{n}', torch.tensor(0.5))",))


def _module(draw: Draw) -> Layer | None:
    d, rank = draw.shape[-1], len(draw.shape)
    options = [f"nn.Bilinear({d}, {d}, 3)|self.m{{n}}(h, h * 2)", "nn.PReLU()|self.m{n}(h)"]
    options += [
        f"nn.utils.parametrizations.weight_norm(nn.Linear({d}, 4))|self.m{{n}}(h)",
        f"nn.utils.parametrizations.spectral_norm(nn.Linear({d}, 3))|self.m{{n}}(h)",
    ]
    if rank == 3 and draw.shape[0] * draw.shape[1] < 16:
        options += [
            f"nn.{kind}({d}, {draw.pick(3, 130)}, batch_first=True{draw.pick('', ', bidirectional=True')})|self.m{{n}}(h)[0]"
            for kind in ("LSTM", "GRU", "RNN")
        ]
    if rank == 3 and d % 2 == 0:
        options.append(f"nn.TransformerEncoderLayer({d}, 2, 8, 0.0, batch_first=True)|self.m{{n}}(h)")
    result, use = draw.pick(*options).split("|")
    return Layer(f"h = {use}", (f"self.m{{n}} = {result}",))


PROPOSALS: Sequence[tuple[int, Callable[[Draw], Layer | None]]] = (
    (3, _text(UNARY)),
    (2, _text(IN_PLACE)),
    (2, _text(FALLBACKS)),
    (3, _text(REDUCTIONS)),
    (5, _text(MOVEMENT)),
    (3, _text(MASKS)),
    (3, _residual),
    (4, _skip),
    (2, _contract),
    (4, _linear),
    (2, _shared),
    (2, _parameter),
    (4, _conv),
    (3, _norm),
    (2, _pool),
    (2, _attention),
    (2, _text(ALIASES)),
    (1, _text(CONTROL)),
    (1, _text(DERIVATIVES)),
    (3, _text(SIZES, SELECTIONS)),
    (1, _buffer),
    (1, _module),
)
