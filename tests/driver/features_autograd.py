"""Features: memory that results share, changes in place, modes of autograd, functions of users."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.driver.features import ANY, ARGUMENT, feature, function, x


# ---- memory that results and arguments share ------------------------------------------------------------------------
@function("results that share memory", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = x * w
    return h, h.t(), h[1:], h.view(-1), h.detach()


@function("a part before the whole", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = (x * w).view(2, 6)
    return h[1], {"whole": h, "again": h}


@function("pieces of one result")
def _(w: Tensor, x: Tensor) -> Any:
    return (x * w).split(2)


function("a parameter as result", wide=True)(lambda w, x: (w, w.expand(3, 4), x * w))


@function("an argument as result", x(3, 4, grad=True), step=ARGUMENT)
def _(w: Tensor, x: Tensor) -> Any:
    return x, x[1:], x.t(), x.detach(), x * w


function("bits of an argument")(lambda w, x: (x.view(torch.int32), x * w))
function("windows and diagonals", wide=True)(lambda w, x: ((x * w).unfold(1, 2, 1), (x * w)[:, :3].diagonal()))


# ---- in place -------------------------------------------------------------------------------------------------------
@function("arguments changed in place", stepped=True, step="in place")
def _(w: Tensor, x: Tensor) -> Any:
    x.mul_(2)
    x[0].add_(1)
    x[:, 1] = 3
    return x, x * w


@function(
    "two arguments in one memory", lambda: (lambda b: (b[:3], b[1:4]))(torch.randn(5, 4)), module="alias", step="alias"
)
def _(w: Tensor, x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    return y * w


@function(
    "a gradient written into an argument",
    lambda: (torch.randn(3, 4, requires_grad=True) * 2,),
    module="in-place",
    step="in-place",
)
def _(w: Tensor, x: Tensor) -> Any:
    return x.mul_(w) + 1


@function("changed behind autograd's back", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    h, k = x * w, x + w
    h.detach().mul_(2)
    k.data.clamp_(-0.5, 0.5)
    d = w.detach()
    return h * k + d * x


@function("changed detached, then both used")
def _(w: Tensor, x: Tensor) -> Any:
    h = x * w
    d = h.detach()
    d.mul_(2)
    return h * h + d * w


@function("what no_grad writes carries no gradient", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        out, total = torch.empty(3, 4), torch.zeros(4)
        torch.mul(x, w, out=out)
        total.add_(w).mul_(0.5)
    return out * w + total * x


@function("values replaced", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    return w.clone().zero_() + x, (w * 2).fill_(3) * x


@function("a parameter whose only use is replaced", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = w * 1
    h[:] = x[0]
    return h * x


@function("parts replaced")
def _(w: Tensor, x: Tensor) -> Any:
    h = w * x
    h[0] = 0
    h[1:].copy_(x[1:])
    h.diagonal().mul_(w[0])
    return h


@function("a parameter changed by the forward pass", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        w.mul_(0.9)
    w.data.clamp_(-0.7, 0.7)
    return x * w


@function("data of a value replaced", step="data", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = x * w
    h.data = h.data * 2
    return h * 3


@function("scatters", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = torch.zeros(5, 4)
    h.index_put_((torch.tensor([0, 0, 2]),), x * w, accumulate=True)
    return (
        h,
        torch.zeros(3, 4).scatter_(1, torch.tensor([[0], [1], [3]]), (x * w)[:, :1]),
        (x * w).masked_scatter(x > 0, x),
    )


# ---- modes of autograd ----------------------------------------------------------------------------------------------
@function("no_grad and enable_grad")
def _(w: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        a = x * w
        with torch.enable_grad():
            b = x * w
    torch.set_grad_enabled(False)
    c = a * w
    torch.set_grad_enabled(True)
    with torch.inference_mode():
        d = (x * 2).sum().item() if False else x.shape[0]
    return a, b, c * w * d


@function("straight through", stepped=True)
def _(w: Tensor, x: Tensor) -> Any:
    h = x * w
    return h + (h.round() - h).detach(), Step.apply(h) * w


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1, 1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.k = k
        return x * w * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w * ctx.k, (g * x).sum(0) * ctx.k * 2, None


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x * w, x + w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (a * w + b if ctx.needs_input_grad[0] else None), (a * x + b).sum(0) * 3


class Absent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * w, x - 1

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        (x,) = ctx.saved_tensors
        return None, (None if a is None else (a * x).sum(0))


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


function("functions with constants")(lambda w, x: Scaled.apply(Scaled.apply(x, w, 2.0), w, 0.5))
function("functions with setup_context", x(3, 4, grad=True), step=ARGUMENT)(lambda w, x: WithContext.apply(x, w))
function("functions without materialized gradients", wide=True)(lambda w, x: Absent.apply(x, w)[0])
function("functions that change their argument", module="in place", step="in place", wide=True)(
    lambda w, x: Dirty.apply(x * w)
)


# ---- torch.func, checkpoints, operators of a library ----------------------------------------------------------------
function("grad")(lambda w, x: torch.func.grad(lambda v: (v.sin() * w).sum())(x) * w)
function("vmap", wide=True)(lambda w, x: torch.func.vmap(lambda r: torch.outer(r, w) @ w)(x))
function("gradients per sample", stepped=True)(
    lambda w, x: torch.func.vmap(torch.func.grad(lambda v, r: (v * r).tanh().sum()), (None, 0))(w, x)
)
function("jvp and vjp")(
    lambda w, x: (
        torch.func.jvp(lambda v: v.sin() * w, (x,), (x * 2,)),
        torch.func.vjp(lambda v: v.sin() * w, x)[1](x)[0],
    )
)
function("jacobians", x(4), wide=True)(
    lambda w, x: (torch.func.jacrev(lambda v: v.sin() * w)(x), torch.func.jacfwd(lambda v: v.sin() * w)(x))
)
function("hessian", x(4), wide=True)(lambda w, x: torch.func.hessian(lambda v: (v**3 * w).sum())(x))
function("functional call", module=ANY, step="Parameter", wide=True)(
    lambda w, x: torch.func.functional_call(nn.Linear(4, 4), {"weight": torch.outer(w, w), "bias": w}, (x,))
)


@function("autograd.grad inside", module=ANY, step="autograd.grad", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    v = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((v.sin() * w).sum(), v, create_graph=True)
    return g * w


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def body(self, h: Tensor) -> Tensor:
        return torch.tanh(self.a(h)) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.body, self.b(x), use_reentrant=self.reentrant))


class InSegments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


feature("checkpoint", lambda: Checkpointed(False))
feature("checkpoint, reentrant", lambda: Checkpointed(True), wide=True)
feature("checkpoint in segments", InSegments, module=ANY, step="checkpoint_sequential", wide=True)


@torch.library.custom_op("daceml_tests::pair", mutates_args=())
def pair(x: Tensor, w: Tensor, k: float) -> tuple[Tensor, Tensor]:
    return x * w * k, (x + w).sum(0)


@torch.library.custom_op("daceml_tests::plain", mutates_args=())
def plain(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("daceml_tests::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


def _pair_backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return (a * w * ctx.k + b, (a * x * ctx.k + b).sum(0), None)


def _pair_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.k = inputs[2]


pair.register_fake(lambda x, w, k: (torch.empty_like(x), x.new_empty(x.shape[1:])))
pair.register_autograd(_pair_backward, setup_context=_pair_context)
plain.register_fake(lambda x: torch.empty_like(x))
function("operators of a library")(lambda w, x: (*pair(x, w, 3.0), plain(x) * w))


@function("operators that change their arguments", module="bump", step="bump", wide=True)
def _(w: Tensor, x: Tensor) -> Any:
    y = x * 2
    bump(y)
    return y * w
