"""Random recursive programs beside PyTorch: statements of many kinds, in random order, at each node of random trees."""

import copy
import importlib.util
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import daceml_train as dt
from daceml_train.driver.forests import Forests
from tests.driver.recursive_programs import trees

HEAD = """
import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.recursive_programs import WIDTH, Program


class Random(Program):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH, bias=False)
        self.plain = nn.RNNCell(WIDTH, WIDTH, nonlinearity="relu")
        self.norm, self.made, self.seen = nn.BatchNorm1d(WIDTH).eval(), nn.ModuleDict(), []
        self.register_buffer("average", torch.ones(1, WIDTH))
        self.last = None
        nn.init.uniform_(self.norm.running_var)

    def layer(self, name):
        if name not in self.made:
            self.made[name] = nn.Linear(WIDTH, WIDTH).double()
        return self.made[name]

    {decorator}
    def visit(self, node, depth=0):
        x = self.leaf(node)
        v = x[:, 1:]
        for part in node.parts:
            y = self.visit(part, depth + 1)
{statements}
        {end}
        return x * 0.9
"""
COMPUTES = """
x = self.both(x, y)
x = x * node.word + y / (1 + depth)
x = np.float64(node.word / 10) * x + y * np.float32(0.5)
x = self.gru(y, x)
x, c = self.lstm(y, (x, x.tanh())); x = x + c
x = self.plain(x, y)
x = self.norm(x) + y
x = x + self.words.weight[node.word] * y
x = torch.where(y > 0, x, y * 0.5)
x = torch.cat([x[:, 2:], y[:, :2]], 1)
x = x.softmax(1) + y.abs().sqrt()
x = functools.reduce(torch.add, [x, y, self.gate(y)])
x = torch.stack([x, y]).amax(0)
x = self.layer(str(node.word % 2))(x) + y
x = x + torch.tensor([node.word]).to(x.dtype) * y
x = x + F.one_hot(torch.tensor([node.word % WIDTH]), WIDTH) * y
x = x + torch.rand(1, WIDTH, dtype=x.dtype) * y
""".strip().splitlines()
VIEWS = ["v = y[:, :2]", "v = y.view(-1)[1:3]", "v = y.detach()", "v = x.detach()[:, :1]", "v = x[0]", "v = y.t()"]
LOOKS = [
    "self.seen.append(round(float(y.sum()), 6))",
    "x = x if (x.sum() > 0).item() else -x",
    "self.seen.append(f'{v.sum().item():.6f}')",
]
CHANGES = ["y.mul_(0.5)", "v.mul_(0.5)", "y[:, 1] = 0.25", "v += 1", "x = x.clone(); x[0, 0] = node.word"]
KEPT = [
    "self.average = 0.9 * self.average + 0.1 * x.detach()",
    "x = x + self.average",
    "self.last = x.detach()",
    "x = x + (0 if self.last is None else self.last)",
    "self.visits += part.word",
]
CUTS = [
    "y = y if node.word % 2 else y.detach()\nx = x + self.layer(str(node.word))(x) * y",
    "x = self.layer(str(part.word))(x if node.word % 3 else x.detach()) + y",
    "v = self.layer(str(node.word))(y)[:, 1:]",
]
USES = ["x = x + v.sum()", "x = x + v.detach().mean()"]
HANDLED = """
try:
    x = x + self.words(torch.tensor([node.word + 3]))
except (IndexError, KeyError):
    self.visits += 1
    x = x + self.gate.bias
""".strip()


def program(seed: int) -> str:
    """The text of a random program."""
    r = random.Random(seed)
    kinds = [COMPUTES, COMPUTES, VIEWS, LOOKS, USES, KEPT, [HANDLED], CHANGES]
    few = r.sample(kinds[2:], r.randint(1, 4))  # what else a program does than compute
    chosen = [r.choice(r.choice([COMPUTES, *few])) for _ in range(r.randint(2, 6))]
    if r.random() < 0.3:  # a view, a look, and a change, one after the other
        chosen += [r.choice(VIEWS), r.choice(LOOKS[:2]), r.choice(CHANGES), r.choice(USES)]
    cuts = random.Random(seed + 1000)
    if cuts.random() < 0.4:  # parameters without a gradient
        chosen.insert(cuts.randrange(len(chosen)), cuts.choice(CUTS))
    body = textwrap.indent("\n".join(chosen), " " * 12)
    decorator = r.choice(["@dt.recursive", ""])
    return HEAD.format(
        decorator=decorator,
        statements=body,
        end=r.choice(["", *KEPT, *COMPUTES[:1]]).replace("y", "x").replace("part", "node"),
    )


def made(seed: int, folder: Path) -> Any:
    """A model of a random program."""
    path = folder / f"random_{seed}.py"
    path.write_text(program(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    return module.Random().double()


def calls(model: Any, called: Any, seeds: Iterator[int] | range) -> Iterator[Any]:
    """What each call leaves: results, gradients, buffers, and what Python has; stops where PyTorch refuses."""
    for seed in seeds:
        model.zero_grad()
        torch.manual_seed(seed)
        result = called(trees(seed))
        result.backward(torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        tensors = [result.detach(), *gradients.values(), *model.buffers(), torch.rand(2)]
        last = None if model.last is None else model.last.clone()
        yield tensors, (list(model.seen), model.visits, list(gradients), last)


SEEDS = (13, 38, 52, 74, 130, *range(12))


@pytest.mark.filterwarnings("ignore:daceml_train")
def test_random_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)  # what is recorded matters
    refused = 0
    for seed in SEEDS:
        model = made(seed, tmp_path)
        twin = copy.deepcopy(model)
        try:
            expected = list(calls(twin, twin, range(3)))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) or "in-place" in str(error), program(seed)
            refused += 1
            continue
        found = calls(model, dt.optimize(model), range(3))
        for (tensors, python), (others, kept) in zip(found, expected, strict=True):
            torch.testing.assert_close(tensors, others, rtol=1e-11, atol=1e-12, msg=program(seed))
            assert python[:3] == kept[:3], program(seed)
            torch.testing.assert_close(python[3], kept[3], rtol=1e-11, atol=1e-12)
    assert refused < len(SEEDS) // 2
