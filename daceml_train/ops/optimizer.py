"""Optimizer updates, in the order of operations of `torch.optim`'s single-tensor versions.

Operands are the parameter, its gradient, the learning rate (0-d, float32 or float64), and the state. The other
hyper-parameters are attributes, or operands after the state for the names in `given`: 0-d float64, so that another
value is no other program. Quantities that are the same for all elements are computed on 0-d float64 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.ops.reduction import require_float
from daceml_train.tensor import Dim, DType, Tensor, same_shape, simplify

Option: TypeAlias = Value | float
"""A hyper-parameter: an attribute, or a 0-d float64 operand."""
T = TypeVar("T", Tensor, Value)


@dataclass(frozen=True, kw_only=True)
class ParameterUpdate(Operator):
    """The update of a parameter. An option that is zero is never `given`: terms that vanish are left out."""

    given: tuple[str, ...] = ()
    """The options that are operands, in their order after all others."""

    def own(self, operands: Sequence[T]) -> Sequence[T]:
        """The operands before the options."""
        return operands[: len(operands) - len(self.given)]

    def option(self, name: str, operands: Sequence[Value]) -> Option:
        """An option, as an operand if it is given as one."""
        if name in self.given:
            return operands[len(operands) - len(self.given) + self.given.index(name)]
        value: float = getattr(self, name)
        return value

    def has(self, name: str) -> bool:
        """Whether an option is not zero."""
        return name in self.given or bool(getattr(self, name))


def at(option: Option, like: Value) -> Option:
    """An option in the element type of an operand."""
    return option.cast(like.dtype) if isinstance(option, Value) else option


def value_of(option: Option, like: Value) -> Value:
    """An option as a value in the element type of an operand."""
    return option.cast(like.dtype) if isinstance(option, Value) else like.constant(option)


def check_update(op: Operator, p: Tensor, grad: Tensor, scalars: Sequence[Tensor], state: Sequence[Tensor]) -> None:
    """Raise `Invalid` unless gradient and state are like `p`, and `scalars` are 0-d floats."""
    require_float(p, op.label)
    for t in (grad, *state):
        if not same_shape(t.shape, p.shape) or t.dtype is not p.dtype:
            raise Invalid(f"{op.label} expects a gradient and a state like {p}, given {t}")
    for t in scalars:
        if t.rank or not t.dtype.is_float:
            raise Invalid(f"{op.label} expects 0-d floats for the learning rate and the step, given {t}")


class CountedUpdate(ParameterUpdate):
    """An update of p by grad, lr, step and state like p (further operands); results are the next p, step and state."""

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, step, *state = self.own(operands)
        check_update(self, p, grad, (lr, step), state)
        return p, step, *(p for _ in state)


@dataclass(frozen=True, kw_only=True)
class SGDUpdate(ParameterUpdate):
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
        p, grad, lr, *buffer = self.own(operands)
        check_update(self, p, grad, (lr,), buffer)
        if len(buffer) > self.has("momentum"):
            raise Invalid(f"sgd_update with momentum {self.momentum} given {len(buffer)} buffers")
        return (p, p) if self.has("momentum") else (p,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, *buffer = self.own(operands)
        grad = directed(grad, p, self.maximize, self.option("weight_decay", operands))
        momentum, dampening = at(self.option("momentum", operands), p), self.option("dampening", operands)
        results: list[Value] = []
        if self.has("momentum"):
            following = buffer[0] * momentum + grad * at(1 - dampening, p) if buffer else grad
            grad = grad + following * momentum if self.nesterov else following
            results.append(following)
        return p - grad * lr.cast(p.dtype), *results

    def flops(self, *operands: Tensor) -> Dim:
        per_element = 2 + 2 * self.has("weight_decay") + self.maximize
        per_element += 3 * (len(self.own(operands)) > 3) + 2 * (self.nesterov and self.has("momentum"))
        return simplify(per_element * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class AdamUpdate(ParameterUpdate):
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
        p, grad, lr, step, *state = self.own(operands)
        check_update(self, p, grad, (lr, step), state)
        if len(state) != 2 + self.amsgrad:
            raise Invalid(f"adam_update expects {2 + self.amsgrad} state arrays, given {len(state)}")
        return p, step, *(p for _ in state)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, exp_avg, exp_avg_sq, *largest = self.own(operands)
        beta1, beta2, eps, decay = (self.option(n, operands) for n in ("beta1", "beta2", "eps", "weight_decay"))
        next_step = step + 1.0
        rate = lr.cast(DType.float64)
        correction1, correction2 = correction(beta1, next_step), correction(beta2, next_step)
        step_size, scale = (rate / correction1).cast(p.dtype), correction2.unary("rsqrt").cast(p.dtype)
        if self.maximize:
            grad = -grad
        if self.has("weight_decay") and self.decoupled:
            p = p * (1.0 - rate * decay).cast(p.dtype)
        elif self.has("weight_decay"):
            grad = grad + p * at(decay, p)
        exp_avg = lerp(exp_avg, grad, 1 - beta1)
        exp_avg_sq = exp_avg_sq * at(beta2, p) + grad * grad * at(1 - beta2, p)
        results = [exp_avg, exp_avg_sq]
        if self.amsgrad:
            results.append(largest[0]._binary("maximum", exp_avg_sq))
        denominator = results[-1].unary("sqrt") * scale + at(eps, p)
        return p - step_size * exp_avg / denominator, next_step, *results

    def flops(self, *operands: Tensor) -> Dim:
        decay = (1 if self.decoupled else 2) if self.has("weight_decay") else 0
        return simplify((22 + decay + self.amsgrad + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class RMSpropUpdate(ParameterUpdate):
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
        p, grad, lr, step, *state = self.own(operands)
        check_update(self, p, grad, (lr, step), state)
        expected = 1 + self.has("momentum") + self.centered
        if len(state) != expected:
            raise Invalid(f"rmsprop_update expects {expected} state arrays, given {len(state)}")
        return p, step, *(p for _ in state)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, square_avg, *more = self.own(operands)
        alpha, eps, momentum = (self.option(name, operands) for name in ("alpha", "eps", "momentum"))
        grad = directed(grad, p, self.maximize, self.option("weight_decay", operands))
        results = [square_avg * at(alpha, p) + grad * grad * at(1 - alpha, p)]
        average = results[0]
        buffer = [more[0] * at(momentum, p)] if self.has("momentum") else []
        if self.centered:
            center = lerp(more[-1], grad, 1 - alpha)
            average = average - center * center
        average = average.unary("sqrt") + at(eps, p)
        if buffer:
            results.append(buffer[0] + grad / average)
        if self.centered:
            results.append(center)
        rate = lr.cast(p.dtype)
        following = p - results[1] * rate if buffer else p - grad * rate / average
        return following, step + 1.0, *results

    def flops(self, *operands: Tensor) -> Dim:
        more = 2 * self.has("momentum") + 5 * self.centered + 2 * self.has("weight_decay") + self.maximize
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
        p, grad, lr, step, total = self.own(operands)
        grad = directed(grad, p, self.maximize, self.option("weight_decay", operands))
        rate = lr.cast(DType.float64)
        if self.has("lr_decay"):
            rate = rate / (step.cast(DType.float64) * self.option("lr_decay", operands) + 1.0)
        total = total + grad * grad
        eps = at(self.option("eps", operands), p)
        return p - grad * rate.cast(p.dtype) / (total.unary("sqrt") + eps), step + 1.0, total

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((13 + 2 * self.has("weight_decay") + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class ASGDUpdate(ParameterUpdate):
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
        p, grad, lr, step, eta, mu, ax = self.own(operands)
        check_update(self, p, grad, (lr, step, eta, mu), (ax,))
        return p, step, eta, mu, p

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, eta, mu, ax = self.own(operands)
        lambd, alpha, t0 = (self.option(name, operands) for name in ("lambd", "alpha", "t0"))
        grad = directed(grad, p, self.maximize, self.option("weight_decay", operands))
        next_step = step + 1.0
        rate, count, now = (x.cast(DType.float64) for x in (lr, next_step, eta))
        p = p * (1.0 - now * lambd).cast(p.dtype) - grad * now.cast(p.dtype)
        averaged = mu.compare("eq", 1.0).where(p, ax + (p - ax) * mu.cast(p.dtype))
        next_eta = rate / (rate * lambd * count + 1.0)._binary("pow", alpha)
        next_mu = 1.0 / (count - t0)._binary("maximum", 1.0)
        numbers = [x.cast(step.dtype).cast(eta.dtype) for x in (next_eta, next_mu)]
        return p, next_step, *numbers, averaged

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((8 + 2 * self.has("weight_decay") + self.maximize) * operands[0].size)


def directed(grad: Value, p: Value, maximize: bool, weight_decay: Option) -> Value:
    """The descent direction: the gradient plus weight decay."""
    if maximize:
        grad = -grad
    return grad + p * at(weight_decay, p) if isinstance(weight_decay, Value) or weight_decay else grad


def correction(beta: Option, step: Value) -> Value:
    """What a running average has seen in `step` steps, of 1; in float64."""
    count = step.cast(DType.float64)
    return 1.0 - value_of(beta, count)._binary("pow", count)


def lerp(start: Value, end: Value, weight: Option) -> Value:
    """`torch.lerp`: from the nearer end, so both ends are exact; by a weight that is an operand, from the start."""
    if isinstance(weight, Value):
        return start + (end - start) * at(weight, start)
    return start + (end - start) * weight if weight < 0.5 else end - (end - start) * (1 - weight)
