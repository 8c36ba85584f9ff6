"""PyTorch's optimizers as operators: the update, its state, and how the state is bound.

The state remains in the optimizer object, under PyTorch's own names, so `state_dict()`, `load_state_dict()` and
learning-rate schedulers continue to work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.errors import Unsupported
from daceml_train.ops.adaptive_optimizers import AdadeltaUpdate, AdamaxUpdate, NAdamUpdate, RAdamUpdate, RpropUpdate
from daceml_train.ops.operator import Value
from daceml_train.ops.optimizer import AdagradUpdate, AdamUpdate, ASGDUpdate, ParameterUpdate, RMSpropUpdate, SGDUpdate
from daceml_train.tensor import DType


@dataclass(frozen=True)
class Update:
    """The update of one parameter group: the operator, and the names of its state in operand order."""

    op: ParameterUpdate
    state: tuple[str, ...]

    def emit(
        self, p: Value, gradient: Value, rate: Value, state: Sequence[Value], options: Sequence[Value]
    ) -> list[Value]:
        """The next parameter and the next state, in the order of `state`; `options` are those that `op` is given."""
        return list(p.builder.emit(self.op, p, gradient, rate, *state, *options))


Group = Mapping[str, Any]


def update_of(optimizer: torch.optim.Optimizer, group: Group) -> Update:
    """The update of a parameter group. Raises `Unsupported` for an optimizer or option without one."""
    kind = type(optimizer)
    if group.get("differentiable") or group.get("capturable"):
        raise Unsupported(f"{kind.__name__} with differentiable=True or capturable=True", advice="leave it False")
    if kind not in _UPDATES:
        *names, last = (known.__name__ for known in _UPDATES)
        raise Unsupported(
            f"optimizer {kind.__module__}.{kind.__name__} has no update inside the graph",
            advice=f"{', '.join(names)} and {last} have; the step runs with PyTorch's own update",
        )
    if not _is_pytorchs(kind.step):
        raise Unsupported(f"{kind.__name__}.step is not PyTorch's own function")
    if any(p.is_complex() for p in group["params"]):
        raise Unsupported("the update of a complex parameter", advice="PyTorch's own update runs")
    return _with_given_options(_UPDATES[kind](group), group)


_FOLDER = os.path.dirname(torch.optim.__file__)


def _is_pytorchs(step: Any) -> bool:
    """Whether this function, within its wrappers, is one of `torch.optim`."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and code.co_filename.startswith(_FOLDER)


def _with_given_options(update: Update, group: Group) -> Update:
    """The update with all positive options as operands: a schedule or a search changes them without compiling.

    16-bit parameters keep constants, which enter their arithmetic unrounded.
    """
    if any(p.dtype not in (torch.float32, torch.float64) for p in group["params"]):
        return update
    op = update.op
    defaults = {f.name: f.default for f in dataclasses.fields(op) if f.type == "float" and getattr(op, f.name) > 0}
    return Update(dataclasses.replace(op, given=tuple(defaults), **defaults), update.state)


def option_source(name: str) -> tuple[str, int | None]:
    """Where a parameter group has an option of an update: its key there, and the position in a tuple."""
    return _IN_TUPLES.get(name, (name, None))


_IN_TUPLES: Mapping[str, tuple[str, int]] = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "shrink": ("etas", 0),
    "grow": ("etas", 1),
    "smallest": ("step_sizes", 0),
    "largest": ("step_sizes", 1),
}


def option_value(group: Group, name: str) -> float:
    """An option of an update, or the learning rate `lr`, as a parameter group has it now."""
    key, position = option_source(name)
    return float(group[key] if position is None else group[key][position])


def _options(group: Group, *names: str) -> dict[str, Any]:
    return {name: group[name] for name in names}


def _betas(group: Group) -> dict[str, Any]:
    beta1, beta2 = (float(b) for b in group["betas"])
    return {"beta1": beta1, "beta2": beta2}


def _sgd(group: Group) -> Update:
    of_momentum = ("momentum", "dampening", "nesterov") if group["momentum"] else ()
    op = SGDUpdate(**_options(group, *of_momentum, "weight_decay", "maximize"))
    return Update(op, ("momentum_buffer",) if group["momentum"] else ())


def _adam(group: Group, decoupled: bool = False) -> Update:
    options = _options(group, "eps", "weight_decay", "amsgrad", "maximize")
    op = AdamUpdate(**_betas(group), **options, decoupled=decoupled or bool(group.get("decoupled_weight_decay")))
    return Update(op, ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())))


def _adamw(group: Group) -> Update:
    return _adam(group, decoupled=True)


def _rmsprop(group: Group) -> Update:
    state = ["step", "square_avg"]
    state += ["momentum_buffer"] if group["momentum"] > 0 else []
    state += ["grad_avg"] if group["centered"] else []
    op = RMSpropUpdate(**_options(group, "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"))
    return Update(op, tuple(state))


def _adagrad(group: Group) -> Update:
    return Update(AdagradUpdate(**_options(group, "lr_decay", "eps", "weight_decay", "maximize")), ("step", "sum"))


def _adadelta(group: Group) -> Update:
    op = AdadeltaUpdate(**_options(group, "rho", "eps", "weight_decay", "maximize"))
    return Update(op, ("step", "square_avg", "acc_delta"))


def _adamax(group: Group) -> Update:
    op = AdamaxUpdate(**_betas(group), **_options(group, "eps", "weight_decay", "maximize"))
    return Update(op, ("step", "exp_avg", "exp_inf"))


def _nadam(group: Group) -> Update:
    options = _options(group, "eps", "weight_decay", "momentum_decay", "maximize")
    op = NAdamUpdate(**_betas(group), **options, decoupled=group["decoupled_weight_decay"])
    return Update(op, ("step", "mu_product", "exp_avg", "exp_avg_sq"))


def _radam(group: Group) -> Update:
    options = _options(group, "eps", "weight_decay", "maximize")
    op = RAdamUpdate(**_betas(group), **options, decoupled=group["decoupled_weight_decay"])
    return Update(op, ("step", "exp_avg", "exp_avg_sq"))


def _rprop(group: Group) -> Update:
    (shrink, grow), (smallest, largest) = group["etas"], group["step_sizes"]
    op = RpropUpdate(shrink=shrink, grow=grow, smallest=smallest, largest=largest, maximize=group["maximize"])
    return Update(op, ("step", "prev", "step_size"))


def _asgd(group: Group) -> Update:
    op = ASGDUpdate(**_options(group, "lambd", "alpha", "t0", "weight_decay", "maximize"))
    return Update(op, ("step", "eta", "mu", "ax"))


_UPDATES: dict[type, Callable[[Group], Update]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adamax: _adamax,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.Rprop: _rprop,
    torch.optim.ASGD: _asgd,
}
"""The optimizers that have an update; one that extends them may do anything else."""


def has_update(kind: type) -> bool:
    """Whether optimizers of this type have an update."""
    return kind in _UPDATES


SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of state that is one number per parameter; all other state is like the parameter."""


def ready(update: Update, state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state exists."""
    return all(isinstance(state.get(name), torch.Tensor) for name in update.state)


def makes_its_state(update: Update) -> bool:
    """Whether the first step creates the state, because its update differs from later ones.

    This is the case for SGD with dampening, which scales the gradient from the second step on; without it, a zero
    momentum buffer reproduces the first step exactly.
    """
    return isinstance(update.op, SGDUpdate) and update.op.has("dampening")


def number_types(update: Update, state: Mapping[str, Any]) -> tuple[tuple[str, DType], ...]:
    """The type of each number among a parameter's state.

    PyTorch makes it float32, or float64 where that is the default; `load_state_dict` casts all of them but `step` to
    the parameter's type. Raises `Unsupported` for a number that is not a tensor of rank 0.
    """
    held = {name: state.get(name) for name in update.state if name in SCALARS}
    for name, number in held.items():
        if number is not None and not (isinstance(number, torch.Tensor) and number.ndim == 0):
            kind = f"tensor {list(number.shape)}" if isinstance(number, torch.Tensor) else type(number).__name__
            raise Unsupported(f"the optimizer's {name} of a parameter is a {kind}, and not a tensor of rank 0")
    types = {n: t.dtype if isinstance(t, torch.Tensor) else _number_type() for n, t in held.items()}
    return tuple((name, DType[str(dtype).removeprefix("torch.")]) for name, dtype in types.items())


def _number_type() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32


@contextlib.contextmanager
def whole_or_none(state: MutableMapping[Any, dict[str, Any]]) -> Iterator[None]:
    """Make entries of an optimizer's state: where this fails, no parameter has some of them, which PyTorch would not
    complete.
    """
    before = {key: dict(entries) for key, entries in state.items() if isinstance(entries, dict)}
    known = set(state)
    try:
        yield
    except BaseException:
        for key in set(state) - known:
            del state[key]
        for key, entries in before.items():
            state[key].clear()
            state[key].update(entries)
        raise


def initial_state(
    name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, size: int | None = None
) -> torch.Tensor:
    """An entry of a parameter's state before the first step, or a shard of it of `size` elements."""
    if name in SCALARS:
        start = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}
        value = start[name] if name in start else _rate(parameter, optimizer)
        return torch.tensor(value, dtype=_number_type(), device="cpu")  # whatever the default device is
    value = initial_value(name, parameter, optimizer)
    if size is not None:
        return parameter.detach().new_full((size,), value)
    return torch.full_like(parameter, value, memory_format=torch.preserve_format)


def initial_value(name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """What all elements of an entry of a parameter's state are before the first step."""
    if name == "step_size":
        return _rate(parameter, optimizer)
    return float(optimizer.defaults["initial_accumulator_value"]) if name == "sum" else 0.0


def _rate(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of a parameter's group."""
    return float(next(g["lr"] for g in optimizer.param_groups if any(p is parameter for p in g["params"])))
