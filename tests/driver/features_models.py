"""Features: recurrence, attention, embeddings, parameters, results of all kinds, buffers, Python, element types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.driver.features import ANY, ARGUMENT, feature, function, x


# ---- recurrence -----------------------------------------------------------------------------------------------------
class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.cell = kind(4, 5, **options)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x)


class Packed(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(4, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(3, 4)
        for t in range(2):
            h, c = self.a(x[:, t], (h, c))
            h = self.c(self.b(x[:, t], h), h)
        return h


_both: dict[str, Any] = {"bidirectional": True, "batch_first": True, "num_layers": 2}
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    feature(f"{_kind.__name__}, both directions", lambda k=_kind: Recurrent(k, **_both), x(3, 2, 4), wide=True)
    _sequences: Any = lambda: (torch.randn(3, 5, 4), torch.tensor([5, 2, 4]))  # noqa: E731
    feature(
        f"{_kind.__name__}, packed",
        lambda k=_kind: Packed(k),
        _sequences,
        module=ANY,
        step="pack_padded",
        wide=_kind is not nn.LSTM,
    )
feature("GRU, both directions, short", lambda: Recurrent(nn.GRU, bidirectional=True), x(2, 3, 4), wide=True)
feature("LSTM with projections", lambda: Recurrent(nn.LSTM, proj_size=3), x(2, 3, 4), wide=True)
feature("RNN without biases", lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False), x(2, 3, 4), wide=True)
feature("GRU without a batch", lambda: Recurrent(nn.GRU), x(3, 4), wide=True)
feature("cells", Cells, x(3, 2, 4), wide=True)


# ---- attention ------------------------------------------------------------------------------------------------------
_SOME_ROWS = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]])
_MASKS: dict[str, Callable[[], Tensor]] = {
    "boolean": lambda: torch.ones(4, 4).tril().bool(),
    "float": lambda: torch.linspace(-1, 1, 16).view(4, 4),
    "fully masked rows": lambda: _SOME_ROWS.bool(),
    "rows of -inf": lambda: _SOME_ROWS.float().log(),
}


def _attend(mask: Callable[[], Tensor] | None, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: F.scaled_dot_product_attention(
        x * w, x, x + w, attn_mask=mask() if mask is not None else None, **options
    )


for _name, _mask in _MASKS.items():
    function(f"attention, {_name}", x(2, 2, 4, 4), wide=_name in ("boolean", "float"))(_attend(_mask))
function("attention, causal and scaled", x(2, 2, 4, 4, grad=True), step=ARGUMENT)(
    _attend(None, is_causal=True, scale=0.3)
)
function("attention, a trained mask", x(2, 2, 5, 4), shape=(5, 5), wide=True)(
    lambda w, x: F.scaled_dot_product_attention(x, x, x, attn_mask=w)
)
function("attention, shared heads", x(2, 4, 5, 4), wide=True)(
    lambda w, x: F.scaled_dot_product_attention(x * w, x[:, :2], x[:, 2:], enable_gqa=True)
)
function("attention, broadcast", x(2, 4, 5, 4), wide=True)(
    lambda w, x: F.scaled_dot_product_attention(x * w, x[:, :1], x[:1, :1])
)
function("attention, other lengths", x(2, 4, 5, 4), wide=True)(
    lambda w, x: F.scaled_dot_product_attention((x * w)[:, :, :2], x, x, is_causal=True)
)


class Padded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        padding = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool)
        padding[0, -1] = True
        return self.attention(x, x, x, key_padding_mask=padding)


feature("attention weights", Padded, x(2, 3, 4), wide=True)
feature("attention with further keys", lambda: Padded(add_bias_kv=True, add_zero_attn=True), x(2, 3, 4), wide=True)
feature("attention of other widths", lambda: Padded(kdim=4, vdim=4), x(2, 3, 4), wide=True)
feature("encoder layer", lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), x(2, 3, 8), wide=True)
feature(
    "transformer",
    lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
    lambda: (torch.randn(2, 3, 8), torch.randn(2, 4, 8)),
    wide=True,
)


# ---- embeddings -----------------------------------------------------------------------------------------------------
def tokens() -> tuple[Tensor, ...]:
    return (torch.tensor([[1, 2, 2], [0, 5, 1]]),)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 4, mode="sum", include_last_offset=True)

    def forward(self, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return self.bag(index, offsets, weights)


feature("embedding, sparse", lambda: nn.Embedding(6, 4, sparse=True), tokens, stepped=True, step="sparse")
feature("embedding, largest norm", lambda: nn.Embedding(6, 4, padding_idx=1, max_norm=0.5), tokens, stepped=True)
feature("embedding, by frequency", lambda: nn.Embedding(6, 4, scale_grad_by_freq=True), tokens, wide=True)
feature("bag, sparse", lambda: nn.EmbeddingBag(6, 4, sparse=True), tokens, step="sparse", wide=True)
for _mode in ("sum", "mean", "max"):
    feature(f"bag, {_mode}", lambda m=_mode: nn.EmbeddingBag(6, 4, mode=m), tokens, wide=_mode != "max")
feature(
    "bag, offsets and weights",
    Bag,
    lambda: (torch.tensor([1, 2, 2, 0, 5]), torch.tensor([0, 2, 2, 5]), torch.rand(5)),
    wide=True,
)


# ---- parameters that are computed, shared, made late ----------------------------------------------------------------
class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def symmetric() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = symmetric()

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(self.layer(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.out(self.embedding(index))


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    module(torch.randn(3, 4))
    return module


OBJECTS = ANY
"""Values are assigned to attributes, which a step repeats in Python after its program."""
feature("weight norm", lambda: parametrizations.weight_norm(nn.Linear(4, 4)))
feature("weight norm by hooks", lambda: nn.utils.weight_norm(nn.Linear(4, 4)), step=OBJECTS, wide=True)
feature("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), step=OBJECTS)
feature(
    "spectral norm by hooks",
    lambda: nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(2, 4, 3))),
    x(3, 2, 5, 5),
    step=OBJECTS,
    wide=True,
)
feature("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4)), wide=True)
feature("parametrized", symmetric, wide=True)
feature("parametrized and remembered", Remembered, step=OBJECTS, wide=True)
feature("pruned", lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), step=OBJECTS)
feature("tied", Tied, tokens, stepped=True)
feature("lazy", lazy)


# ---- results and arguments of all kinds -----------------------------------------------------------------------------
@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    extra: Any = None


class Named(NamedTuple):
    a: Tensor
    b: Any


function("dataclass", stepped=True)(lambda w, x: Output((x * w).sum(), x * w, 3))
function("named tuple and nesting")(
    lambda w, x: Named(x * w, [{"a": (None, 3)}, x.argmax(), x.shape[0], x.shape, "s", w * 2])
)
_given: Any = lambda: (torch.randn(3, 4), None, 2.5, "mean", [torch.randn(4), 3], {"k": torch.randn(4)})  # noqa: E731
function("arguments of all kinds", _given)(
    lambda w, x, mask, scale, mode, listed, named: getattr(x * w * scale + listed[0] * listed[1] + named["k"], mode)(0)
)
function("without elements", x(0, 4))(lambda w, x: (x * w, (x * w).sum(), (x * w).mean(0)))
function("without dimensions", x(), shape=(1,), wide=True)(lambda w, x: (x * w, w))
function("unused parameters and constants", wide=True)(lambda w, x: (torch.ones(3), x * 2, w[:0].sum() + 1))


# ---- buffers --------------------------------------------------------------------------------------------------------
class Buffers(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("recent", torch.zeros(2, 4), persistent=False)
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def buffers(name: str, **options: Any) -> Any:
    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        feature(f"buffers, {name}", lambda: Buffers(f), **options)
        return f

    return enter


@buffers("changed in place", stepped=True)
def _(m: Any, x: Tensor) -> Any:
    m.mean.lerp_(x.mean(0), 0.1).clamp_(-1, 1)
    m.count.add_(1)
    m.recent[0, 1:3] += 1
    m.plain.mul_(0.5)
    return m.mean, x * m.w + m.mean + m.recent.sum(0) * m.plain


@buffers("averages of parameters under no_grad", stepped=True)
def _(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(m.w, alpha=0.1)
    return x * m.w + x * m.mean


@buffers("assigned", stepped=True, step=OBJECTS)
def _(m: Any, x: Tensor) -> Any:
    m.mean = m.mean * 0.9 + x.mean(0).detach()
    m.count += 1
    m.plain = m.plain * 0.5
    return x * m.w + m.mean * m.plain


@buffers("at a place that a buffer holds", step=ANY, module=ANY, wide=True)
def _(m: Any, x: Tensor) -> Any:
    m.recent[m.count % 2] = x.mean(0)
    m.count += 1
    return x * m.w + m.recent.sum(0)


@buffers("with other data", module="set_", step="set_", wide=True)
def _(m: Any, x: Tensor) -> Any:
    m.mean.data.add_(1)
    m.mean.data = m.mean.data + 1
    return x * m.w * m.mean


for _number, _options in enumerate(({"momentum": 0.3}, {"track_running_stats": False}, {"affine": False})):
    feature(
        f"batch norm {_number}",
        lambda o=_options: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, **o)),
        x(5, 4),
        wide=True,
    )
_average: Any = lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))  # noqa: E731
feature("batch norm, cumulative average", _average, x(5, 4), module=ANY, step="data-dependent")
feature("batch norm, evaluating", lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), x(5, 4), wide=True)


# ---- Python between operators ---------------------------------------------------------------------------------------
function("a branch on a size", wide=True)(lambda w, x: x * w if x.shape[0] > 2 else x - w)
function("a branch on a value", stepped=True, module=ANY, step="ranching")(lambda w, x: x * w if x.sum() > 0 else x - w)
function("a number from a tensor", module=ANY, step=ANY)(lambda w, x: x * w * x.sum().item())
function("sizes that depend on values", module=ANY, step="depends on data")(lambda w, x: (x[x > 0] * 2, w * x))
function("cond", wide=True)(lambda w, x: torch.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: a - b, (x, w)))
function("NumPy", module=ANY, step=ANY, wide=True)(lambda w, x: x * w + torch.from_numpy(np.sin(x.numpy())))


@function("a loop of unknown length", module=ANY, step="ranching")
def _(w: Tensor, x: Tensor) -> Any:
    h, n = x * w, 0
    while h.abs().max() > 0.1 and n < 3:
        h, n = h * 0.5, n + 1
    return h


@function("an error caught", module=ANY, step=ANY, wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    try:
        return torch.cat([x, w])
    except RuntimeError:
        return x * w


@function("a hook on a value", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = x * w
    if h.requires_grad:
        h.register_hook(lambda g: g * 3)
    return h * 2


@function("code over which TorchDynamo stumbles", module=ANY, step=ANY, stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    k = torch.zeros(4)
    torch.no_grad()(k.add_)(w)
    return x * w * k


@function("a retained gradient", module=ANY, step="retain_grad", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = x * w
    if h.requires_grad:
        h.retain_grad()
    return h * 2


# ---- element types and unusual numbers ------------------------------------------------------------------------------
# Sums of bfloat16 gradients end in one rounding here and there in another; both are as far from the exact ones.
function("half precision", tolerance=2**-8)(
    lambda w, x: (
        (x.half() * w.half()).float(),
        x.bfloat16() * w.bfloat16(),
        (x.double() * w).float(),
        x.to(torch.int64),
    )
)


@function("autocast", tolerance=1e-2, wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ torch.outer(w, w)


_odd: Any = lambda: (torch.tensor([[float("nan"), 1.0, -1.0, float("inf")]] * 3),)  # noqa: E731
function("not a number", _odd, stepped=True)(
    lambda w, x: (F.relu(x * w), x.max(), x.softmax(-1), torch.nan_to_num(x) * w, x.sort().values, x.amax(0) * w)
)
