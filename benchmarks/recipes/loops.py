"""Recipes: what else people do between steps, around the loss, and to the model while it trains."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import swa_utils

from benchmarks.recipes.sequences import packed
from benchmarks.recipes.way import STEPS, Way, batch, small, train

FLOAT32 = torch.float32


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _between(change: Callable[[nn.Module, optim.Optimizer], Any], at: tuple[int, ...] = (2,)) -> Callable[[Way], None]:
    """Five steps, with a change before some of them."""

    def recipe(way: Way) -> None:
        model = small()
        optimizer = _sgd(model)
        step = way.trainer(model, optimizer)
        for number in range(STEPS):
            if number in at:
                change(model, optimizer)
            way.note("loss", step(*batch(number)))
        way.finish(model, optimizer)

    return recipe


# ---- averages -------------------------------------------------------------------------------------------------------
def averaged(**options: Any) -> Callable[[Way], None]:
    """A running average of the parameters, with recomputed statistics."""

    def recipe(way: Way) -> None:
        model = small()
        optimizer = _sgd(model)
        step, average = way.trainer(model, optimizer), swa_utils.AveragedModel(model, **options)
        for number in range(STEPS):
            way.note("loss", step(*batch(number)))
            average.update_parameters(model)
        swa_utils.update_bn([batch(i)[0] for i in range(3)], average)
        called = way.compiled(average.eval())
        way.note("output", called(batch(7)[0]))
        way.finish(average)
        way.finish(model, optimizer)

    return recipe


def swa_rate(way: Way) -> None:
    """`SWALR` takes over from another scheduler."""
    model = small()
    optimizer = _sgd(model)
    step = way.trainer(model, optimizer)
    first, last = optim.lr_scheduler.ExponentialLR(optimizer, 0.9), swa_utils.SWALR(optimizer, 0.05, 2)
    for number in range(STEPS):
        way.note("loss", step(*batch(number)))
        (first if number < 2 else last).step()
        way.note("rate", optimizer.param_groups[0]["lr"])
    way.finish(model, optimizer)


# ---- gradients ------------------------------------------------------------------------------------------------------
def accumulated(way: Way) -> None:
    """Gradients of two parts are added up: a loop of the user's own, and `micro_batches`; without buffers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(torch.float64)
    optimizer = _sgd(model)
    if way.kind == "training_step":
        step = way.trainer(model, optimizer, micro_batches=2)
        for number in range(STEPS):
            way.note("loss", step(*batch(number)))
    else:
        called = way.compiled(model)
        for number in range(STEPS):
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for x, y in zip(*(t.chunk(2) for t in batch(number)), strict=True):
                loss = nn.functional.mse_loss(called(x), y) / 2
                loss.backward()
                total += loss.detach()
            optimizer.step()
            way.note("loss", total)
    for parameter in model.parameters():
        parameter.grad = None
    way.finish(model, optimizer)


def norm_clipped(way: Way) -> None:
    """`clip_grad_norm_` between the gradients and the update."""
    model = small()
    clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)  # noqa: E731
    extra = {"clip_norm": 0.1} if way.kind == "training_step" else {"clip": clip}
    train(way, model, _sgd(model), **extra)


def value_clipped(way: Way) -> None:
    """`clip_grad_value_` between the gradients and the update."""
    model = small()
    clip = lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01)  # noqa: E731
    extra = {"clip_value": 0.01} if way.kind == "training_step" else {"clip": clip}
    train(way, model, _sgd(model), **extra)


def scaled(enabled: bool) -> Callable[[Way], None]:
    """A `GradScaler`, which with enabled=False does nothing."""

    def recipe(way: Way) -> None:
        model = small(FLOAT32)
        optimizer = _sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=enabled)
        step = way.trainer(model, optimizer, scaler=scaler)
        for number in range(STEPS):
            way.note("loss", step(*batch(number, dtype=FLOAT32)))
            way.note("scale", scaler.get_scale())
        way.finish(model, optimizer)

    return recipe


def autocast(way: Way) -> None:
    """bfloat16 by `torch.autocast` within the model."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small(FLOAT32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = self.inner(x)
            return out.float()

    model = Cast()
    optimizer = _sgd(model)
    step = way.trainer(model, optimizer)
    for number in range(STEPS):
        way.note("loss", step(*batch(number, dtype=FLOAT32)))
    way.finish(model, optimizer)


def autocast_around(way: Way) -> None:
    """`torch.autocast` around the whole step, as loops have it around the call of the model."""
    model = small(FLOAT32)
    optimizer = _sgd(model)
    step = way.trainer(model, optimizer)
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=number != 3):
            way.note("loss", step(*batch(number, dtype=FLOAT32)))
    way.finish(model, optimizer)


# ---- checkpoints ----------------------------------------------------------------------------------------------------
def resumed(way: Way) -> None:
    """State is saved, loaded into new objects, and training goes on."""
    model, file = small(), io.BytesIO()
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=0.01)
    step = way.trainer(model, optimizer)
    for number in range(2):
        way.note("loss", step(*batch(number)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    found, model = torch.load(file), small()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    train(way, model, optimizer)


def rolled_back(way: Way) -> None:
    """State of an earlier step is loaded into the objects that train; `assign` puts other tensors in their place."""
    model = small()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    step = way.trainer(model, optimizer)
    kept: Any = None
    for number in range(STEPS):
        if number == 1:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if number == 3:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        way.note("loss", step(*batch(number)))
    way.finish(model, optimizer)


def assigned(way: Way) -> None:
    """`load_state_dict(assign=True)` puts other parameters in place, and a new optimizer trains them."""
    model = small()
    optimizer = _sgd(model)
    train(way, model, optimizer)
    model.load_state_dict(copy.deepcopy(small().state_dict()), assign=True)
    train(way, model, _sgd(model))


def _checkpointed(way: Way) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first = nn.Linear(6, 6).to(torch.float64)
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(torch.float64)

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    model = Kept()
    train(way, model, _sgd(model))


def _checkpointed_norm(way: Way) -> None:
    """The statistics move once more in the backward pass."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.inner = nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)).to(torch.float64)

        def forward(self, x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    model = Kept()
    train(way, model, _sgd(model))


# ---- changes midway -------------------------------------------------------------------------------------------------
def _freeze(model: Any, _: Any) -> None:
    model[0].requires_grad_(not model[0].weight.requires_grad)


def _add_group(way: Way) -> None:
    """A frozen layer gets a parameter group of its own."""
    model = small()
    model[3].requires_grad_(False)
    optimizer = optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)
    step = way.trainer(model, optimizer)
    for number in range(STEPS):
        if number == 2:
            model[3].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.01})
        way.note("loss", step(*batch(number)))
    way.finish(model, optimizer)


def _new_layer(model: Any, optimizer: optim.Optimizer) -> None:
    torch.manual_seed(9)
    model.append(nn.Linear(4, 4, dtype=torch.float64))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def _replaced(model: Any, optimizer: optim.Optimizer) -> None:
    torch.manual_seed(9)
    model[3] = nn.Linear(8, 4, dtype=torch.float64)
    optimizer.add_param_group({"params": list(model[3].parameters())})


def _options(_: Any, optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0].update(weight_decay=0.1, momentum=0.5, lr=0.03)


def _noise(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _data(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 0.01


def _mode(model: nn.Module, _: Any) -> None:
    model.train(not model.training)


def _hook(model: Any, _: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)


def _late_hook(model: Any, _: Any) -> None:
    def halved(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halved)


def _another_step(_: Any, optimizer: Any) -> None:
    own, parameters = optimizer.step, optimizer.param_groups[0]["params"]
    optimizer.step = lambda: ([p.grad.mul_(2) for p in parameters], own())


def _forward_hook(model: Any, _: Any) -> None:
    model[0].register_forward_hook(lambda module, given, result: result * 0.5)


def _step_hook(_: Any, optimizer: optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda o, a, k: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.5))


def _parametrized(model: Any, optimizer: optim.Optimizer) -> None:
    nn.utils.parametrizations.weight_norm(model[3])
    optimizer.add_param_group({"params": list(model[3].parametrizations.parameters())})


def moved(way: Way) -> None:
    """float32, from the third step on float64; the optimizer's state moves with the parameters' types."""
    model = small(FLOAT32)
    optimizer = _sgd(model)
    step = way.trainer(model, optimizer)
    for number in range(STEPS):
        dtype = FLOAT32 if number < 2 else torch.float64
        if number == 2:
            model.to(dtype)
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
        way.note("loss", step(*batch(number, dtype=dtype)))
    way.finish(model, optimizer)


def evaluated(way: Way) -> None:
    """Evaluation without gradients between the steps, through the same compiled model where there is one."""
    model = small()
    optimizer = _sgd(model)
    step, called = way.trainer(model, optimizer), way.compiled(model)
    for number in range(STEPS):
        way.note("loss", step(*batch(number)))
        model.eval()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            way.note("output", called(batch(number + 50, 3)[0]).clone())
        model.train()
    way.finish(model, optimizer)


def two_optimizers(way: Way) -> None:
    """A generator and a discriminator, each with a step of its own."""
    torch.manual_seed(5)
    first, second = nn.Linear(6, 6).to(torch.float64), nn.Linear(6, 1).to(torch.float64)
    a, b = _sgd(first), _sgd(second)

    def fooled(result: Tensor) -> Tensor:
        return -second(result).mean()

    def told(found: Tensor) -> Tensor:
        return found.square().mean()

    generate, discriminate = way.trainer(first, a, fooled), way.trainer(second, b, told)
    for number in range(STEPS):
        x = batch(number)[0]
        way.note("loss", generate(x))
        way.note("loss", discriminate(x))
        for parameter in [*first.parameters(), *second.parameters()]:
            parameter.grad = None
    way.finish(first, a)
    way.finish(second, b)


def _cumulative(way: Way) -> None:
    """A batch normalization whose running statistics are cumulative averages."""
    model = small()
    model[1].momentum = None  # type: ignore[assignment]
    train(way, model, _sgd(model))
    way.note("output", way.compiled(model.eval())(batch(7)[0]))


def partly_used(way: Way) -> None:
    """The model returns a loss and its logits, of which the step uses the loss alone; the batch size varies."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.inner(x)
            return logits.logsumexp(-1).mean() - logits[:, 0].mean(), logits

    model = Both()
    optimizer = _sgd(model)
    step = way.trainer(model, optimizer, lambda result: result[0])
    for number, rows in enumerate((3, 5, 7, 2, 4)):
        way.note("loss", step(batch(number, rows)[0]))
    way.finish(model, optimizer)


def recipes() -> Iterator[tuple[str, Callable[[Way], None]]]:
    """All of them, by name."""
    ema = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}
    yield "average SWA", averaged()
    yield "average EMA", averaged(**ema)
    yield "average EMA with buffers", averaged(use_buffers=True, **ema)
    yield "average SWALR", swa_rate
    yield "gradients accumulated", accumulated
    yield "gradients clipped by norm", norm_clipped
    yield "gradients clipped by value", value_clipped
    yield "gradients scaled", scaled(True)
    yield "gradients scaled, enabled=False", scaled(False)
    yield "autocast bfloat16 in the model", autocast
    yield "autocast bfloat16 around the step", autocast_around
    yield "checkpoint loaded into new objects", resumed
    yield "checkpoint loaded midway", rolled_back
    yield "checkpoint assigned", assigned
    yield "activation checkpointing", _checkpointed
    yield "activation checkpointing of a batch norm", _checkpointed_norm
    yield "midway freezing", _between(_freeze, (2,))
    yield "midway freezing and unfreezing", _between(_freeze, (1, 3))
    yield "midway a parameter group is added", _add_group
    yield "midway a layer is added", _between(_new_layer)
    yield "midway a layer is replaced", _between(_replaced)
    yield "midway options of the optimizer", _between(_options)
    yield "midway parameters in place", _between(_noise, (1, 3))
    yield "midway parameters' data", _between(_data, (1, 3))
    yield "midway evaluation mode", _between(_mode, (1, 3))
    yield "midway a hook of a gradient", _between(_hook)
    yield "midway a hook after accumulation", _between(_late_hook)
    yield "midway another step of the optimizer", _between(_another_step)
    yield "midway a hook of a module", _between(_forward_hook)
    yield "midway a hook of the optimizer", _between(_step_hook)
    yield "midway weight normalization", _between(_parametrized)
    yield "midway from float32 to float64", moved
    yield "evaluation between the steps", evaluated
    yield "statistics as cumulative averages", _cumulative
    yield "packed sequences", packed
    yield "two optimizers", two_optimizers
    yield "a loss and results, batch sizes vary", partly_used
