"""ATen's operators of neural networks: convolutions, normalizations, pools, attention, dropout, losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.requirements import index_within
from daceml_train.frontends.torch.rules.translate import RULES, Translator, rule
from daceml_train.ops.divided_tables import LookupRows
from daceml_train.ops.elementwise import Iota
from daceml_train.ops.normalization import running_statistics
from daceml_train.ops.operator import Value
from daceml_train.ops.resample import MODES
from daceml_train.tensor import DType, product, same, simplify

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@rule("convolution.default")
def _convolution(
    t: Translator,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    spatial = len(w.shape) - 2
    if len(x.shape) == len(w.shape) - 1:
        x = x.view((1, *x.shape))
    geometry = {
        "stride": _spread(stride, spatial),
        "padding": _spread(padding, spatial),
        "dilation": _spread(dilation, spatial),
        "transposed": transposed,
        "output_padding": _spread(output_padding, spatial),
        "groups": groups,
    }
    y = t.emit("convolution", x, w, *(() if bias is None else (bias,)), **geometry)
    return y.view(t.type.shape)


def _spread(values: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One value per spatial dimension, where a single one may apply to all."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * count if len(values) == 1 else values


def _affine(t: Translator, weight: Value | None, bias: Value | None) -> tuple[Value, ...]:
    if weight is None and bias is not None:
        weight = t.full(1, bias.shape, bias.dtype)
    return tuple(v for v in (weight, bias) if v is not None)


@rule("native_layer_norm.default")
def _layer_norm(
    t: Translator, x: Value, shape: Sequence[Any], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...] | None:
    if 0 in x.shape:
        return None
    return _as_typed(t, t.emit_all("layer_norm", x, *_affine(t, weight, bias), dims=len(shape), eps=eps))


def _as_typed(t: Translator, results: Sequence[Value]) -> tuple[Value, ...]:
    """Results in PyTorch's element types: statistics of 16-bit floats are kept wide here."""
    return tuple(r if type_ is None else r.cast(type_.dtype) for r, type_ in zip(results, t.types, strict=False))


@rule("native_group_norm.default")
def _group_norm(
    t: Translator, x: Value, weight: Value | None, bias: Value | None, n: Any, c: Any, hw: Any, groups: int, eps: float
) -> tuple[Value, ...]:
    return _as_typed(t, t.emit_all("group_norm", x, *_affine(t, weight, bias), groups=groups, eps=eps))


@rule("_native_batch_norm_legit_functional.default", "_native_batch_norm_legit.default")
def _batch_norm(
    t: Translator,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    if not training:
        unchanged = (mean, variance)
        same = (v.cast(w.dtype) if w else v for v, w in zip(unchanged, t.types[3:], strict=True))
        return (_inference(t, x, weight, bias, mean, variance, eps), *_absent(t), *same)
    return _as_typed(t, _with_statistics(t, x, weight, bias, mean, variance, momentum, eps))


def _with_statistics(
    t: Translator,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Result, mean and rstd of the batch, and the running statistics after it."""
    y, batch_mean, rstd, batch_variance = t.emit_all("batch_norm", x, *_affine(t, weight, bias), eps=eps)
    count = simplify(product((x.shape[0], *x.shape[2:])))
    following = running_statistics(t.graph, mean, variance, batch_mean, batch_variance, momentum, count)
    return (y, batch_mean, rstd, *following)


@rule("_batch_norm_with_update_functional.default")
def _batch_norm_with_update(t: Translator, *operands: Any) -> tuple[Value, ...]:
    """Also returns a reserve for the backward pass of other libraries, which is empty on the CPU."""
    y, batch_mean, rstd, *following = _with_statistics(t, *operands)
    return _as_typed(t, (y, batch_mean, rstd, *_absent(t, slice(3, 4)), *following))


@rule("_batch_norm_no_update.default")
def _batch_norm_no_update(t: Translator, *operands: Any) -> tuple[Value, ...]:
    x, weight, bias, mean, variance, _, eps = operands
    return (_inference(t, x, weight, bias, mean, variance, eps), *_absent(t, slice(1, 4)))


@rule("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    t: Translator, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    results = t.emit_all("batch_norm", x, *_affine(t, weight, bias), eps=eps)[:3]
    return tuple(v.cast(wanted.dtype) if wanted is not None else v for v, wanted in zip(results, t.types, strict=True))


@rule("_native_batch_norm_legit_no_training.default")
def _batch_norm_inference(
    t: Translator,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    return (_inference(t, x, weight, bias, mean, variance, eps), *_absent(t))


def _absent(t: Translator, results: slice = slice(1, 3)) -> tuple[Value, ...]:
    """The results of a batch norm that are empty: statistics of the batch, where it uses the running ones."""
    return tuple(t.full(0, expected.shape, expected.dtype) for expected in t.types[results] if expected is not None)


def _inference(
    t: Translator, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, eps: float
) -> Value:
    return t.emit("batch_norm_inference", x, mean, variance, *_affine(t, weight, bias), eps=eps)


@rule("_softmax.default")
def _softmax(t: Translator, x: Value, dim: int, half_to_float: bool) -> Value | None:
    return _along(t, x.cast(t.type.dtype), dim, "softmax")


@rule("_log_softmax.default")
def _log_softmax(t: Translator, x: Value, dim: int, half_to_float: bool) -> Value | None:
    return _along(t, x.cast(t.type.dtype), dim, "log_softmax")


@rule("_safe_softmax.default")
def _safe_softmax(t: Translator, x: Value, dim: int, dtype: Any = None) -> Value | None:
    """Zeros, and zero gradients, along rows of which every element is -inf."""
    x = x.cast(t.type.dtype)
    if not x.shape or 0 in x.shape:
        return x if x.shape else None
    alive = x.compare("ne", -math.inf).reduce("max", (dim % len(x.shape),), keepdim=True)
    return alive.where(_along(t, alive.where(x, 0.0), dim, "softmax"), 0.0)


@rule("_softmax_backward_data.default")
def _softmax_backward(t: Translator, grad: Value, y: Value, dim: int, dtype: Any) -> Value | None:
    if not y.shape or 0 in y.shape or grad.dtype is not t.type.dtype:
        return None
    return y * (grad - (grad * y).sum((dim % len(y.shape),), keepdim=True))


def _along(t: Translator, x: Value, dim: int, name: str) -> Value:
    if 0 in x.shape:
        return x
    return t.emit(name, x, dim=dim % len(x.shape)) if x.shape else t.emit(name, x.view((1,)), dim=0).view(())


@rule("embedding.default")
def _embedding(
    t: Translator, weight: Value, indices: Value, padding_idx: int = -1, scale: bool = False, sparse: bool = False
) -> Value | None:
    if scale:
        _refuse_sparse(t, weight, sparse)
        return None
    return t.emit("embedding", weight, indices, padding_idx=padding_idx, sparse=sparse)


@rule("daceml_train.lookup_rows.default")
def _lookup_rows(t: Translator, table: Value, indices: Value, rows: int, ranks: int, group: str) -> Value:
    position = sum(isinstance(node.op, LookupRows) for node in t.graph.nodes)
    return table.apply(LookupRows(ranks, position, rows), indices)


@rule("_embedding_bag.default")
def _embedding_bag(
    t: Translator,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample: Value | None = None,
    include_last: bool = False,
    padding_idx: int = -1,
) -> tuple[Value | None, ...] | None:
    """Sums and means over bags of one size, which two-dimensional indices describe."""
    plain = not scale and mode in (0, 1) and per_sample is None and not include_last and padding_idx < 0
    if plain and len(indices.shape) == 1 and not same(offsets.shape[0], 0):
        producer = next((node.op for node in reversed(t.graph.nodes) if offsets.name in node.outputs), None)
        if (
            isinstance(producer, Iota)
            and producer.start == 0
            and same(producer.step * offsets.shape[0], indices.shape[0])
        ):
            y = t.emit("embedding_bag", weight, indices, offsets, sparse=sparse)
            return (y / float(producer.step) if mode else y, None, None, None)
    _refuse_sparse(t, weight, sparse)
    return None


def _refuse_sparse(t: Translator, weight: Value, sparse: bool) -> None:
    """PyTorch's own derivative would be a sparse tensor, which programs do not take."""
    if sparse and t.active(weight):
        raise Unsupported("an embedding with sparse gradients", advice="leave out sparse=True to compile it")


def _pair(values: int | Sequence[int]) -> tuple[int, int]:
    both = _spread(values, 2)
    return both[0], both[1]


@rule("max_pool2d_with_indices.default")
def _max_pool2d(
    t: Translator,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Value, ...]:
    size = _pair(kernel)
    return t.emit_all(
        "max_pool2d",
        x,
        kernel=size,
        stride=_pair(stride) if stride else size,
        padding=_pair(padding),
        dilation=_pair(dilation),
        ceil_mode=ceil_mode,
    )


@rule("max_pool2d_with_indices_backward.default")
def _max_pool2d_backward(
    t: Translator,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    size = _pair(kernel)
    gradient = t.emit(
        "max_pool2d_grad",
        grad,
        indices,
        kernel=size,
        stride=_pair(stride) if stride else size,
        padding=_pair(padding),
        dilation=_pair(dilation),
        ceil_mode=ceil_mode,
        input_shape=x.shape,
    )
    return t.connected(gradient, x)


@rule("_adaptive_avg_pool2d.default")
def _adaptive_avg_pool2d(t: Translator, x: Value, size: Sequence[Any]) -> Value | None:
    """Windows of one size, where they divide the image."""
    sides = list(zip(x.shape[-2:], t.type.shape[-2:], strict=True))
    if 0 in x.shape or not all(isinstance(n, int) and isinstance(m, int) and m and n % m == 0 for n, m in sides):
        return None
    window = (sides[0][0] // sides[0][1], sides[1][0] // sides[1][1])
    return x + 0.0 if window == (1, 1) else t.emit("avg_pool2d", x, kernel=window, stride=window)


@rule("avg_pool2d.default")
def _avg_pool2d(
    t: Translator,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Value:
    size = _pair(kernel)
    return t.emit(
        "avg_pool2d",
        x,
        kernel=size,
        stride=_pair(stride) if stride else size,
        padding=_pair(padding),
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        divisor=divisor,
    )


@rule("daceml_train.attention.default")
def _attention(
    t: Translator, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float
) -> tuple[Value, ...]:
    masks = () if mask is None else (mask.cast(q.dtype),)
    return t.emit_all("attention", q, k, v, *masks, causal=causal, scale=float(scale))


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(
    t: Translator, logp: Value, target: Value, weight: Value | None, reduction: int, ignore_index: Any
) -> tuple[Value, ...] | None:
    if target.dtype is not DType.int64:
        return None
    classes = logp.shape[min(1, len(logp.shape) - 1)]
    last = f"{classes - 1 if isinstance(classes, int) else f'{classes} - 1'}"
    target = index_within(t, target, classes, f"a target is out of bounds: classes are 0 to {last}", int(ignore_index))
    loss, total = t.emit_all(
        "nll_loss",
        logp,
        target,
        *(() if weight is None else (weight,)),
        reduction=REDUCTIONS[reduction],
        ignore_index=int(ignore_index),
    )
    return loss, total.cast(logp.dtype)


@rule("mse_loss.default")
def _mse_loss(t: Translator, x: Value, target: Value, reduction: int = 1) -> Value:
    dtype = t.type.dtype
    return t.emit("mse_loss", x.cast(dtype), target.cast(dtype), reduction=REDUCTIONS[reduction])


def _of_difference(t: Translator, x: Value, target: Value, reduction: int, kind: str, bound: float) -> Value:
    """A loss of `x - target` that is linear beyond `bound`."""
    dtype = t.type.dtype
    losses = t.emit(kind, x.cast(dtype) - target.cast(dtype), t.value(bound, dtype))
    dims = tuple(range(len(losses.shape)))
    return losses if reduction == 0 or not dims else losses.mean(dims) if reduction == 1 else losses.sum(dims)


@rule("smooth_l1_loss.default")
def _smooth_l1_loss(t: Translator, x: Value, target: Value, reduction: int = 1, beta: float = 1.0) -> Value:
    return _of_difference(t, x, target, reduction, "smooth_l1", beta)


@rule("huber_loss.default")
def _huber_loss(t: Translator, x: Value, target: Value, reduction: int = 1, delta: float = 1.0) -> Value:
    return _of_difference(t, x, target, reduction, "huber", delta)


# ---- windows and grids -------------------------------------------------------------------------------------------


@rule("im2col.default")
def _im2col(
    t: Translator, x: Value, kernel: Sequence[int], dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Value | None:
    if 0 in x.shape:
        return None
    return t.emit("im2col", x, **_windows(kernel, dilation, padding, stride))


@rule("col2im.default")
def _col2im(
    t: Translator,
    x: Value,
    size: Sequence[Any],
    kernel: Sequence[int],
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Value | None:
    if 0 in x.shape or not isinstance(x.shape[-2], int):
        return None
    return t.emit("col2im", x, size=tuple(size), **_windows(kernel, dilation, padding, stride))


def _windows(kernel: Any, dilation: Any, padding: Any, stride: Any) -> dict[str, tuple[int, int]]:
    given = {"kernel": kernel, "dilation": dilation, "padding": padding, "stride": stride}
    return {name: _pair(value) for name, value in given.items()}


def _resample(t: Translator, x: Value, size: Sequence[Any], *options: Any, mode: str, corners: bool) -> Value | None:
    flag, scales = (options[0] if options else False, options[1:]) if corners else (False, options)
    spatial = len(x.shape) - 2
    given = (*scales, *[None] * (spatial - len(scales)))
    if any(not isinstance(s, float | int | None) for s in given) or 0 in x.shape:
        return None
    if corners and not x.dtype.is_float:
        return None  # PyTorch's weights of integers are integers, too
    return t.emit(
        "resample",
        x,
        mode=mode,
        source=tuple(x.shape[2:]),
        target=tuple(t.type.shape[2:]),
        scales=given,
        corners=bool(flag),
    )


for _mode, _calls in MODES.items():
    for _call in _calls:
        if _call is not None:
            RULES[f"aten.{_call}.default"] = functools.partial(
                _resample, mode=_mode, corners=not _mode.startswith("nearest")
            )
