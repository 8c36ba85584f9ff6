"""Several threads: models train side by side, and the number of PyTorch's threads may change at any call."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.conformity import assert_tensors_conform, gradients
from tests.driver.networks import mlp

pytestmark = pytest.mark.compiled


def test_two_threads_train_two_models() -> None:
    models = [mlp() for _ in range(4)]
    references = copy.deepcopy(models)
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    barrier = threading.Barrier(4)

    def by_step(model: nn.Module) -> None:
        step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.05))
        barrier.wait()
        for _ in range(30):
            step(x, y)
        assert step.breaks == []

    def by_module(model: nn.Module, called: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(30):
            optimizer.zero_grad()
            F.mse_loss(called(x), y).backward()
            optimizer.step()

    def optimized(model: nn.Module) -> None:
        barrier.wait()
        by_module(model, dt.optimize(model))

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(f, m) for f, m in zip([by_step, optimized] * 2, models, strict=True)]
        for future in futures:
            future.result()
    for model, reference in zip(models, references, strict=True):
        by_module(reference, reference)
        expected = reference.state_dict()
        assert_tensors_conform(model.state_dict(), expected, expected, 1e-4)


def test_one_module_called_from_many_threads() -> None:
    model, inputs = mlp(), [torch.randn(6, 8) for _ in range(8)]
    optimized = dt.optimize(model)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: optimized(x), inputs * 5))
    for x, result in zip(inputs * 5, results, strict=True):
        torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-6)
    results[0].sum().backward()
    found = gradients(model)
    model.zero_grad()
    model(inputs[0]).sum().backward()
    assert_tensors_conform(found, gradients(model), gradients(model))


def test_changing_the_number_of_threads() -> None:
    model, before = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.get_num_threads()
    reference = copy.deepcopy(model)
    optimized, x = dt.optimize(model), torch.randn(256, 64)
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    try:
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            torch.testing.assert_close(optimized(x), reference(x), rtol=1e-4, atol=1e-5)
            step(x, x)
            optimizer.zero_grad()
            F.mse_loss(reference(x), x).backward()
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    assert_tensors_conform(model.state_dict(), reference.state_dict(), reference.state_dict(), 1e-4)
    assert step.breaks == []
