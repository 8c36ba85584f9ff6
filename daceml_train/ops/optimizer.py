"""Optimizer updates, in the order of operations of `torch.optim`'s single-tensor versions.

Operands are the parameter, its gradient, the learning rate (0-d, float32 or float64), and the state; hyper-parameters
other than the learning rate are attributes. Quantities that are the same for all elements are computed on 0-d float64
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.ops.reduction import require_float
from daceml_train.tensor import Dim, DType, Tensor, same_shape, simplify


def check_update(op: Operator, p: Tensor, grad: Tensor, scalars: Sequence[Tensor], state: Sequence[Tensor]) -> None:
    """Raise `Invalid` unless gradient and state are like `p`, and `scalars` are 0-d floats."""
    require_float(p, op.label)
    for t in (grad, *state):
        if not same_shape(t.shape, p.shape) or t.dtype is not p.dtype:
            raise Invalid(f"{op.label} expects a gradient and a state like {p}, given {t}")
    for t in scalars:
        if t.rank or not t.dtype.is_float:
            raise Invalid(f"{op.label} expects 0-d floats for the learning rate and the step, given {t}")


class CountedUpdate(Operator):
    """An update of p by grad, lr, step and state like p (further operands); results are the next p, step and state."""

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, step, *state = operands
        check_update(self, p, grad, (lr, step), state)
        return p, step, *(p for _ in state)


@dataclass(frozen=True, kw_only=True)
class SGDUpdate(Operator):
    """`torch.optim.SGD`: operands p, grad, lr and, from the second step on with momentum, the momentum buffer.

    Results: the next p and, with momentum, the next buffer. In the first step the buffer starts as the gradient.
    """

    name = "sgd_update"
    operands = ("p", "grad", "lr", "*buffer")
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False

    results = ("next_p", "*next_buffer")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, *buffer = operands
        check_update(self, p, grad, (lr,), buffer)
        if len(buffer) > bool(self.momentum):
            raise Invalid(f"sgd_update with momentum {self.momentum} given {len(buffer)} buffers")
        return (p, p) if self.momentum else (p,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, *buffer = operands
        grad = directed(grad, p, self.maximize, self.weight_decay)
        made: list[Value] = []
        if self.momentum:
            following = buffer[0] * self.momentum + grad * (1 - self.dampening) if buffer else grad
            grad = grad + following * self.momentum if self.nesterov else following
            made.append(following)
        return p - grad * lr.cast(p.dtype), *made

    def flops(self, *operands: Tensor) -> Dim:
        per_element = 2 + 2 * bool(self.weight_decay) + self.maximize
        per_element += 3 * (len(operands) > 3) + 2 * (self.nesterov and bool(self.momentum))
        return simplify(per_element * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class AdamUpdate(Operator):
    """`torch.optim.Adam`, and `AdamW` where `decoupled`.

    Operands: p, grad, lr, step (0-d: steps done so far), exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq.
    Results: the next p, step, exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq.
    """

    name = "adam_update"
    operands = ("p", "grad", "lr", "step", "*state")
    results = ("next_p", "next_step", "*next_state")
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    amsgrad: bool = False
    maximize: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, step, *state = operands
        check_update(self, p, grad, (lr, step), state)
        if len(state) != 2 + self.amsgrad:
            raise Invalid(f"adam_update expects {2 + self.amsgrad} state arrays, given {len(state)}")
        return p, step, *(p for _ in state)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, exp_avg, exp_avg_sq, *largest = operands
        next_step = step + 1.0
        rate, count = lr.cast(DType.float64), next_step.cast(DType.float64)
        correction1 = 1.0 - count.constant(self.beta1)._binary("pow", count)
        correction2 = 1.0 - count.constant(self.beta2)._binary("pow", count)
        step_size, scale = (rate / correction1).cast(p.dtype), correction2.unary("rsqrt").cast(p.dtype)
        if self.maximize:
            grad = -grad
        if self.weight_decay and self.decoupled:
            p = p * (1.0 - rate * self.weight_decay).cast(p.dtype)
        elif self.weight_decay:
            grad = grad + p * self.weight_decay
        exp_avg = lerp(exp_avg, grad, 1 - self.beta1)
        exp_avg_sq = exp_avg_sq * self.beta2 + grad * grad * (1 - self.beta2)
        made = [exp_avg, exp_avg_sq]
        if self.amsgrad:
            made.append(largest[0]._binary("maximum", exp_avg_sq))
        denominator = made[-1].unary("sqrt") * scale + self.eps
        return p - step_size * exp_avg / denominator, next_step, *made

    def flops(self, *operands: Tensor) -> Dim:
        decay = (1 if self.decoupled else 2) if self.weight_decay else 0
        return simplify((22 + decay + self.amsgrad + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class RMSpropUpdate(Operator):
    """`torch.optim.RMSprop`.

    Operands: p, grad, lr, step, square_avg, with momentum momentum_buffer, and if `centered` grad_avg. Results: the
    next p, step and state, in the same order.
    """

    name = "rmsprop_update"
    operands = ("p", "grad", "lr", "step", "*state")
    results = ("next_p", "next_step", "*next_state")
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, step, *state = operands
        check_update(self, p, grad, (lr, step), state)
        expected = 1 + (self.momentum > 0) + self.centered
        if len(state) != expected:
            raise Invalid(f"rmsprop_update expects {expected} state arrays, given {len(state)}")
        return p, step, *(p for _ in state)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, square_avg, *more = operands
        grad = directed(grad, p, self.maximize, self.weight_decay)
        made = [square_avg * self.alpha + grad * grad * (1 - self.alpha)]
        average = made[0]
        buffer = [more[0] * self.momentum] if self.momentum > 0 else []
        if self.centered:
            center = lerp(more[-1], grad, 1 - self.alpha)
            average = average - center * center
        average = average.unary("sqrt") + self.eps
        if buffer:
            made.append(buffer[0] + grad / average)
        if self.centered:
            made.append(center)
        rate = lr.cast(p.dtype)
        following = p - made[1] * rate if buffer else p - grad * rate / average
        return following, step + 1.0, *made

    def flops(self, *operands: Tensor) -> Dim:
        more = 2 * (self.momentum > 0) + 5 * self.centered + 2 * bool(self.weight_decay) + self.maximize
        return simplify((15 + more) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class AdagradUpdate(CountedUpdate):
    """`torch.optim.Adagrad`: operands p, grad, lr, step and sum; results the next p, step and sum."""

    name = "adagrad_update"
    operands = ("p", "grad", "lr", "step", "sum")
    results = ("next_p", "next_step", "next_sum")
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    maximize: bool = False

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, total = operands
        grad = directed(grad, p, self.maximize, self.weight_decay)
        rate = lr.cast(DType.float64)
        if self.lr_decay:
            rate = rate / (step.cast(DType.float64) * self.lr_decay + 1.0)
        total = total + grad * grad
        return p - grad * rate.cast(p.dtype) / (total.unary("sqrt") + self.eps), step + 1.0, total

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((13 + 2 * bool(self.weight_decay) + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class ASGDUpdate(Operator):
    """`torch.optim.ASGD`: stochastic gradient descent, and the average of the parameters.

    Operands: p, grad, lr, step, eta (0-d: this step's rate), mu (0-d: the new parameter's weight in the average) and
    ax, the average. Results: the next p and state, in the same order; `lr` is for the next step's rate. Numbers are
    rounded to the type of `step`, which is PyTorch's for them, also where a loaded state holds them in a wider one.
    """

    name = "asgd_update"
    operands = ("p", "grad", "lr", "step", "eta", "mu", "ax")
    results = ("next_p", "next_step", "next_eta", "next_mu", "next_ax")
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0
    maximize: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, step, eta, mu, ax = operands
        check_update(self, p, grad, (lr, step, eta, mu), (ax,))
        return p, step, eta, mu, p

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, eta, mu, ax = operands
        grad = directed(grad, p, self.maximize, self.weight_decay)
        next_step = step + 1.0
        rate, count, now = (x.cast(DType.float64) for x in (lr, next_step, eta))
        p = p * (1.0 - now * self.lambd).cast(p.dtype) - grad * now.cast(p.dtype)
        averaged = mu.compare("eq", 1.0).where(p, ax + (p - ax) * mu.cast(p.dtype))
        next_eta = rate / (rate * self.lambd * count + 1.0)._binary("pow", count.constant(self.alpha))
        next_mu = 1.0 / (count - self.t0)._binary("maximum", 1.0)
        numbers = [x.cast(step.dtype).cast(eta.dtype) for x in (next_eta, next_mu)]
        return p, next_step, *numbers, averaged

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((8 + 2 * bool(self.weight_decay) + self.maximize) * operands[0].size)


def directed(grad: Value, p: Value, maximize: bool, weight_decay: float) -> Value:
    """The descent direction: the gradient plus weight decay."""
    if maximize:
        grad = -grad
    return grad + p * weight_decay if weight_decay else grad


def lerp(start: Value, end: Value, weight: float) -> Value:
    """`torch.lerp`: from the nearer end, so both ends are exact."""
    return start + (end - start) * weight if weight < 0.5 else end - (end - start) * (1 - weight)
