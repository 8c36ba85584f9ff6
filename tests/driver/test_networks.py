"""Networks of every promised kind train to eager's numbers, as drop-in modules and as whole steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.driver.conformity import Optimizer, assert_conforms, through_optimize, through_step
from tests.driver.networks import PROBLEMS

pytestmark = pytest.mark.compiled

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.02, momentum=0.9, nesterov=True),
    "dampening": partial(SGD, lr=0.02, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "maximize": partial(SGD, lr=0.001, maximize=True),
    "adam": partial(ADAM, lr=1e-3, weight_decay=0.01),
    "amsgrad": partial(ADAM, lr=1e-3, amsgrad=True, betas=(0.8, 0.95)),
    "adamw": partial(ADAMW, lr=1e-3, eps=1e-7),
}
OF_NETWORK = {"mlp": "adam", "resnet": "momentum", "lstm": "nesterov", "tied_lm": "adamw"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_optimize(name: str) -> None:
    assert_conforms(PROBLEMS[name], OPTIMIZERS[OF_NETWORK.get(name, "adamw")], through_optimize)


@pytest.mark.parametrize("name", PROBLEMS)
def test_training_step(name: str) -> None:
    assert_conforms(PROBLEMS[name], OPTIMIZERS[OF_NETWORK.get(name, "adamw")], through_step)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    assert_conforms(PROBLEMS["mlp"], OPTIMIZERS[name], through_step)


@pytest.mark.parametrize("name", ["mlp", "resnet", "tied_lm"])
def test_fifty_steps(name: str) -> None:
    assert_conforms(PROBLEMS[name], OPTIMIZERS[OF_NETWORK[name]], through_step, steps=50)
