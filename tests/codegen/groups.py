"""Bodies of kernels: the families that training steps consist of."""

from collections.abc import Sequence

from daceml_train.ops.operator import Value, make
from daceml_train.ops.random import Uniform
from daceml_train.tensor import DType


def layer_norm(x: Value, weight: Value, bias: Value) -> Sequence[Value]:
    last = len(x.shape) - 1
    mean = x.mean((last,), True)
    centered = x - mean
    rstd = (centered.unary("square").mean((last,), True) + 1e-5).unary("rsqrt")
    return centered * rstd * weight + bias, mean, rstd


def layer_norm_backward(grad: Value, x: Value, weight: Value, mean: Value, rstd: Value) -> Sequence[Value]:
    last = len(x.shape) - 1
    rows = tuple(range(last))
    normal = (x - mean) * rstd
    scaled = grad * weight
    inner = scaled - scaled.mean((last,), True) - normal * (scaled * normal).mean((last,), True)
    return inner * rstd, (grad * normal).sum(rows), grad.sum(rows)


def softmax(x: Value) -> Value:
    last = len(x.shape) - 1
    powers = (x - x.reduce("max", (last,), True)).unary("exp")
    return powers / powers.sum((last,), True)


def softmax_backward(grad: Value, y: Value) -> Value:
    return y * (grad - (y * grad).sum((len(y.shape) - 1,), True))


def log_softmax(x: Value) -> Value:
    last = len(x.shape) - 1
    shifted = x - x.reduce("max", (last,), True)
    return shifted - shifted.unary("exp").sum((last,), True).unary("log")


def softmax_over(dim: int):
    def body(x: Value) -> Value:
        powers = (x - x.reduce("max", (dim,), True)).unary("exp")
        return powers / powers.sum((dim,), True)

    return body


def bias_gelu(x: Value, bias: Value) -> Value:
    return (x + bias).unary("gelu_tanh")


def gelu_backward(grad: Value, h: Value, kind: str = "gelu_tanh") -> Value:
    row = make(kind).row
    from daceml_train.ops.elementwise import emit_expression

    return emit_expression(h.builder, row.gradients[0], {"a": h, "g": grad})


def bias_gelu_backward(grad: Value, x: Value, bias: Value) -> Sequence[Value]:
    dx = gelu_backward(grad, x + bias)
    return dx, dx.sum(tuple(range(len(x.shape) - 1)))


def bias_gelu_erf_backward(grad: Value, x: Value, bias: Value) -> Sequence[Value]:
    dx = gelu_backward(grad, x + bias, "gelu_erf")
    return dx, dx.sum(tuple(range(len(x.shape) - 1)))


def _over(x: Value, channel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dims = tuple(d for d in range(len(x.shape)) if d != channel)
    return dims, tuple(s if d == channel else 1 for d, s in enumerate(x.shape))


def batch_norm(channel: int):
    def body(x: Value, weight: Value, bias: Value, running: Value) -> Sequence[Value]:
        dims, shape = _over(x, channel)
        mean = x.mean(dims, True)
        centered = x - mean
        variance = centered.unary("square").mean(dims, True)
        rstd = (variance + 1e-5).unary("rsqrt")
        y = (centered * rstd * weight.view(shape) + bias.view(shape)).unary("relu")
        flat = mean.view(weight.shape)
        return y, flat, rstd.view(weight.shape), running * 0.9 + flat * 0.1

    return body


def batch_norm_backward(channel: int):
    def body(grad: Value, y: Value, x: Value, weight: Value, mean: Value, rstd: Value) -> Sequence[Value]:
        dims, shape = _over(x, channel)
        grad = (y.compare("le", 0.0)).where(0.0, grad)
        normal = (x - mean.view(shape)) * rstd.view(shape)
        grad_bias = grad.sum(dims, True)
        grad_weight = (grad * normal).sum(dims, True)
        count = 1
        for d in dims:
            count = count * x.shape[d]
        dx = (grad - grad_bias / count - normal * (grad_weight / count)) * (rstd * weight).view(shape)
        return dx, grad_weight.view(weight.shape), grad_bias.view(weight.shape)

    return body


def cross_entropy(logits: Value, target: Value) -> Sequence[Value]:
    rows, classes = logits.shape
    log_probability = log_softmax(logits)
    (index,) = logits.builder.emit(make("iota", shape=(rows, classes), dim=1))
    hit = index.compare("eq", target.view((rows, 1)))
    loss = -(hit.where(log_probability, 0.0)).sum((1,))
    scale = 1.0 / 64
    grad = (log_probability.unary("exp") - hit.cast(logits.dtype)) * scale
    return loss.sum((0,)) * scale, grad


def glu(x: Value) -> Value:
    half = x.shape[-1] // 2
    last = len(x.shape) - 1
    return x.slice(last, 0, half) * x.slice(last, half, 2 * half).unary("sigmoid")


def dropout(x: Value, seed: Value) -> Value:
    keep = seed.apply(Uniform(x.shape, 3)).compare("ge", 0.25)
    return keep.where(x * (1 / 0.75), 0.0)


def adam(p: Value, g: Value, m: Value, v: Value, step: Value) -> Sequence[Value]:
    m2 = m * 0.9 + g * 0.1
    v2 = v * 0.999 + g * g * 0.001
    one = m.constant(1.0)
    correction1 = one - m.constant(0.9).apply(make("pow"), step)
    correction2 = one - m.constant(0.999).apply(make("pow"), step)
    update = (m2 / correction1) / ((v2 / correction2).unary("sqrt") + 1e-8)
    return p - update * 1e-3, m2, v2


def column_sum(x: Value) -> Value:
    return x.sum(tuple(range(len(x.shape) - 1)))


def side_by_side(x: Value, y: Value, z: Value) -> Sequence[Value]:
    """Results that share no operand."""
    return x.unary("neg"), y.unary("exp"), z.unary("square")


def outer(x: Value, y: Value) -> Sequence[Value]:
    """Results of equal sizes, along two dimensions of a third one."""
    rows, lanes = x.unary("neg"), y.unary("exp")
    return rows, lanes, rows.view((*x.shape, 1)) + lanes


def full_mean(x: Value) -> Sequence[Value]:
    mean = x.mean(tuple(range(len(x.shape))))
    return mean, x - mean


__all__ = ["DType"]
