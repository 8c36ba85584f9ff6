"""Optimizer updates whose step sizes adapt to each element: Adadelta, Adamax, NAdam, RAdam and Rprop.

Signatures and order of operations are those of `ops.optimizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.ops.operator import Builder, Value
from daceml_train.ops.optimizer import (
    CountedUpdate,
    Option,
    ParameterUpdate,
    at,
    check_update,
    correction,
    directed,
    lerp,
    value_of,
)
from daceml_train.tensor import Dim, DType, Tensor, simplify


@dataclass(frozen=True, kw_only=True)
class AdadeltaUpdate(CountedUpdate):
    """`torch.optim.Adadelta`: operands p, grad, lr, step, square_avg and acc_delta; results the next p and state."""

    name = "adadelta_update"
    operands = ("p", "grad", "lr", "step", "square_avg", "acc_delta")
    results = ("next_p", "next_step", "next_square_avg", "next_acc_delta")
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, square_avg, acc_delta = self.own(operands)
        rho = self.option("rho", operands)
        kept, added, eps = at(rho, p), at(1 - rho, p), at(self.option("eps", operands), p)
        grad = directed(grad, p, self.maximize, self.option("weight_decay", operands))
        square_avg = square_avg * kept + grad * grad * added
        deviation = (square_avg + eps).unary("sqrt")
        delta = (acc_delta + eps).unary("sqrt") / deviation * grad
        acc_delta = acc_delta * kept + delta * delta * added
        return p - delta * lr.cast(p.dtype), step + 1.0, square_avg, acc_delta

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((28 + 2 * self.has("weight_decay") + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class AdamaxUpdate(CountedUpdate):
    """`torch.optim.Adamax`: operands p, grad, lr, step, exp_avg and exp_inf; results the next p and state."""

    name = "adamax_update"
    operands = ("p", "grad", "lr", "step", "exp_avg", "exp_inf")
    results = ("next_p", "next_step", "next_exp_avg", "next_exp_inf")
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, exp_avg, exp_inf = self.own(operands)
        beta1, beta2, eps = (self.option(name, operands) for name in ("beta1", "beta2", "eps"))
        grad = directed(grad, p, self.maximize, self.option("weight_decay", operands))
        next_step = step + 1.0
        exp_avg = lerp(exp_avg, grad, 1 - beta1)
        exp_inf = (exp_inf * at(beta2, p))._binary("maximum", grad.unary("abs") + at(eps, p))
        rate = lr.cast(DType.float64) / correction(beta1, next_step)
        return p - rate.cast(p.dtype) * exp_avg / exp_inf, next_step, exp_avg, exp_inf

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((15 + 2 * self.has("weight_decay") + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class NAdamUpdate(ParameterUpdate):
    """`torch.optim.NAdam`.

    Operands: p, grad, lr, step, mu_product (0-d: the product of all momenta so far), exp_avg and exp_avg_sq. Results:
    the next p and state, in the same order.
    """

    name = "nadam_update"
    operands = ("p", "grad", "lr", "step", "mu_product", "exp_avg", "exp_avg_sq")
    results = ("next_p", "next_step", "next_mu_product", "next_exp_avg", "next_exp_avg_sq")
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled: bool = False
    maximize: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        p, grad, lr, step, mu_product, *state = self.own(operands)
        check_update(self, p, grad, (lr, step, mu_product), state)
        return p, step, mu_product, p, p

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, mu_product, exp_avg, exp_avg_sq = self.own(operands)
        beta1, beta2, eps = (self.option(name, operands) for name in ("beta1", "beta2", "eps"))
        next_step = step + 1.0
        rate, count = lr.cast(DType.float64), next_step.cast(DType.float64)
        p, grad = _decayed(p, grad, rate, self.option("weight_decay", operands), self.decoupled, self.maximize)
        decay = self.option("momentum_decay", operands)
        mu, mu_next = ((1.0 - x.constant(0.96)._binary("pow", x * decay) * 0.5) * beta1 for x in (count, count + 1.0))
        mu_product = mu_product * mu.cast(mu_product.dtype)
        held = mu_product.cast(DType.float64)
        exp_avg = lerp(exp_avg, grad, 1 - beta1)
        exp_avg_sq = exp_avg_sq * at(beta2, p) + grad * grad * at(1 - beta2, p)
        corrected = exp_avg_sq / correction(beta2, next_step).cast(p.dtype)
        denominator = corrected.unary("sqrt") + at(eps, p)
        of_grad = (rate * (1.0 - mu) / (1.0 - held)).cast(p.dtype)
        of_average = (rate * mu_next / (1.0 - held * mu_next)).cast(p.dtype)
        p = p - of_grad * grad / denominator
        return p - of_average * exp_avg / denominator, next_step, mu_product, exp_avg, exp_avg_sq

    def flops(self, *operands: Tensor) -> Dim:
        decay = (1 if self.decoupled else 2) if self.has("weight_decay") else 0
        return simplify((29 + decay + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class RAdamUpdate(CountedUpdate):
    """`torch.optim.RAdam`: operands p, grad, lr, step, exp_avg and exp_avg_sq; results the next p and state.

    The adaptive step size counts from the step on in which its variance is tractable, which is decided on a 0-d value.
    """

    name = "radam_update"
    operands = ("p", "grad", "lr", "step", "exp_avg", "exp_avg_sq")
    results = ("next_p", "next_step", "next_exp_avg", "next_exp_avg_sq")
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, lr, step, exp_avg, exp_avg_sq = self.own(operands)
        beta1, beta2, eps = (self.option(name, operands) for name in ("beta1", "beta2", "eps"))
        next_step = step + 1.0
        rate, count = lr.cast(DType.float64), next_step.cast(DType.float64)
        p, grad = _decayed(p, grad, rate, self.option("weight_decay", operands), self.decoupled, self.maximize)
        exp_avg = lerp(exp_avg, grad, 1 - beta1)
        exp_avg_sq = exp_avg_sq * at(beta2, p) + grad * grad * at(1 - beta2, p)
        correction1, correction2 = correction(beta1, next_step), correction(beta2, next_step)
        longest = 2 / (1 - beta2) - 1
        length = longest - count * 2.0 * value_of(beta2, count)._binary("pow", count) / correction2
        rectified = (length - 4.0) * (length - 2.0) * longest / (length * ((longest - 4) * (longest - 2)))
        scale, rectified = (x.unary("sqrt").cast(p.dtype) for x in (correction2, rectified))
        moved = exp_avg / correction1.cast(p.dtype) * lr.cast(p.dtype)
        adapted = moved * (scale / (exp_avg_sq.unary("sqrt") + at(eps, p))) * rectified
        return p - length.compare("gt", 5.0).where(adapted, moved), next_step, exp_avg, exp_avg_sq

    def flops(self, *operands: Tensor) -> Dim:
        decay = (1 if self.decoupled else 2) if self.has("weight_decay") else 0
        return simplify((29 + decay + self.maximize) * operands[0].size)


@dataclass(frozen=True, kw_only=True)
class RpropUpdate(CountedUpdate):
    """`torch.optim.Rprop`: operands p, grad, lr, step, prev and step_size; results the next p and state.

    The learning rate is where the step sizes start, and counts no more. Where the gradient has changed its sign, the
    element stays and the gradient is forgotten.
    """

    name = "rprop_update"
    operands = ("p", "grad", "lr", "step", "prev", "step_size")
    results = ("next_p", "next_step", "next_prev", "next_step_size")
    shrink: float = 0.5
    grow: float = 1.2
    smallest: float = 1e-6
    largest: float = 50.0
    maximize: bool = False

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        p, grad, _, step, prev, step_size = self.own(operands)
        shrink, grow = (value_of(self.option(name, operands), p) for name in ("shrink", "grow"))
        smallest, largest = (at(self.option(name, operands), p) for name in ("smallest", "largest"))
        grad = -grad if self.maximize else grad
        agreement = grad * prev
        turned = agreement.compare("lt", 0.0)
        factor = agreement.compare("gt", 0.0).where(grow, 1.0)
        step_size = step_size * turned.where(shrink, factor)
        step_size = step_size._binary("clamp_min", smallest)._binary("clamp_max", largest)
        grad = turned.where(0.0, grad)
        return p - grad.unary("sign") * step_size, step + 1.0, grad, step_size

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((12 + self.maximize) * operands[0].size)


def _decayed(
    p: Value, grad: Value, rate: Value, weight_decay: Option, decoupled: bool, maximize: bool
) -> tuple[Value, Value]:
    """Parameter and gradient with the decay of the weights, which is the parameter's own where it is decoupled."""
    if not decoupled or (not isinstance(weight_decay, Value) and not weight_decay):
        return p, directed(grad, p, maximize, weight_decay)
    return p * (1.0 - rate * weight_decay).cast(p.dtype), directed(grad, p, maximize, 0.0)
