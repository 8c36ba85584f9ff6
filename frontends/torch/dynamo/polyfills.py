"""Functions of PyTorch that check data, rewritten so that a graph can contain them with their checks.

TorchDynamo breaks a graph where a branch depends on data, also one that only raises. These functions have no such
branch. TorchDynamo uses them in place of the originals with any backend; eager execution never does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import TensorVariable, UserDefinedClassVariable, UserFunctionVariable


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """`F.gaussian_nll_loss`; a negative variance raises when the program runs."""
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    else:
        torch._assert_async((var >= 0).logical_or(var.isnan()).all(), "var has negative entry/entries")
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = torch.unsqueeze(var, -1)
        elif input.ndim != var.ndim or sum(b for a, b in zip(input.size(), var.size(), strict=True) if a != b) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`torch.cov`; negative weights, or weights that sum to zero, raise when the program runs."""
    if input.ndim > 2:
        raise RuntimeError(f"cov(): expected input to have two or fewer dimensions but got {input.ndim} dimensions")
    if input.dtype == torch.bool:
        raise RuntimeError("cov(): bool dtype is not supported for input")
    x = input.view(1, -1) if input.ndim < 2 else input
    count = x.shape[1]
    weights = None
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is None:
            continue
        if given.ndim > 1 or given.numel() != count:
            raise RuntimeError(f"cov(): expected {name} of as many elements as there are observations")
        if given.is_floating_point() != (name == "aweights"):
            raise RuntimeError(f"cov(): {name} of the type {given.dtype}")
        if count:
            torch._assert_async((given >= 0).all(), f"cov(): {name} cannot be negative")
        weights = given if weights is None else weights * given
    if weights is None:
        total: Any = count
        weighted = x
        freedom: Any = max(count - correction, 0)
    else:
        total, weighted = weights.sum(), x * weights
        torch._assert_async(total != 0, "cov(): weights sum to zero, can't be normalized")
        if aweights is not None and correction != 0:
            freedom = total - correction * (weights * aweights).sum() / total
        else:
            freedom = total - correction
        freedom = freedom.clamp_min(0)
    mean = _divided(weighted.sum(1), total)
    centered = x - mean.unsqueeze(1)
    product = torch.mm(centered, (centered if weights is None else centered * weights).t().conj())
    return _divided(product, freedom).squeeze()


def _divided(x: Tensor, by: Any) -> Tensor:
    """Division by a count that may be 0, which then yields NaN or infinity, as for tensors."""
    if isinstance(by, Tensor) or by != 0:
        result: Tensor = x / by
        return result
    nothing: Tensor = x.new_zeros((), dtype=torch.get_default_dtype() if not x.is_floating_point() else x.dtype)
    return x / nothing


def corrcoef(input: Tensor) -> Tensor:
    """`torch.corrcoef`, by `cov`."""
    c = cov(input)
    if c.ndim == 0:
        return c / c
    d = c.diagonal()
    deviation = (d.real if d.is_complex() else d).sqrt()
    c = c / deviation.view(-1, 1) / deviation.view(1, -1)
    if c.is_complex():
        return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))
    return c.clip(-1, 1)


def cumulative_batch_norm(self: Any, input: Tensor) -> Tensor:
    """`forward` of a batch normalization with `momentum=None`: the factor of the cumulative average is a tensor."""
    self._check_input_dim(input)
    counts = self.training and self.track_running_stats and self.num_batches_tracked is not None
    if counts:
        self.num_batches_tracked.add_(1)
    own = self.training or (self.running_mean is None and self.running_var is None)
    mean, var = self.running_mean, self.running_var
    if self.training and not self.track_running_stats:
        mean = var = None
    if not counts or mean is None or var is None or self.momentum is not None:
        return F.batch_norm(input, mean, var, self.weight, self.bias, own, self.momentum or 0.0, self.eps)
    # With momentum 1 the batch's own statistics are left in tensors that hold zeros.
    now = torch.zeros_like(mean), torch.zeros_like(var)
    result = F.batch_norm(input, *now, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        factor = 1.0 / self.num_batches_tracked.double()
        for running, value in zip((mean, var), now, strict=True):
            average = factor.to(value.dtype) * value + (1.0 - factor).to(value.dtype) * running
            running.data.copy_(average)  # PyTorch counts no version
    return result


def variable(data: Tensor, requires_grad: bool = False) -> Tensor:
    """`torch.autograd.Variable` of a tensor: the same memory without a derivative, or as a leaf."""
    result = data.detach()
    return result.requires_grad_() if requires_grad else result


POLYFILLS: dict[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    torch.cov: cov,
    torch.corrcoef: corrcoef,
}
"""Function of PyTorch -> the one that a graph can contain."""


@functools.cache
def install() -> None:
    """Register them with TorchDynamo."""
    for original, ours in POLYFILLS.items():
        get_torch_obj_rule_map().pop(original, None)  # otherwise it enters graphs unchanged, and breaks them there
        torch._dynamo.substitute_in_graph(original, skip_signature_check=True)(ours)
    _install_cumulative()
    _install_variable()


def _install_cumulative() -> None:
    """A method is no function that TorchDynamo looks up, and the factor of a plain batch normalization is a number."""
    original, forward = UserFunctionVariable.call_function, torch.nn.modules.batchnorm._BatchNorm.forward
    ours: Any = cumulative_batch_norm

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is forward and args and getattr(getattr(args[0], "value", None), "momentum", 0) is None:
            return original(UserFunctionVariable(ours), tx, args, kwargs)
        return original(self, tx, args, kwargs)

    UserFunctionVariable.call_function = call  # type: ignore[method-assign]


def _install_variable() -> None:
    """A class is no function that TorchDynamo looks up; code of the time before PyTorch 0.4 calls this one."""
    original: Any = UserDefinedClassVariable.call_function
    ours: Any = variable

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = [a for a in given if isinstance(a, TensorVariable)]
        if self.value is torch.autograd.Variable and len(given) <= 2 and tensors and not {*kwargs} - _VARIABLE:
            return UserFunctionVariable(ours).call_function(tx, args, kwargs)
        return original(self, tx, args, kwargs)

    UserDefinedClassVariable.call_function = call  # type: ignore[method-assign]


_VARIABLE = {"data", "requires_grad"}
"""Its arguments; the others no longer have a meaning."""
