"""Programs whose data have another structure in each step, or whose step is several trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.programs.program import BATCH, WIDTH, Program, Train, drawn, named


@named("dynamic lengths")
class Lengths(Program):
    """A recurrent network over sequences whose length is another one in each step."""

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x = drawn(number, 3 + 5 * number % 7, 64, WIDTH)
        return x, x[-1]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for position in range(len(x)):
            h = torch.tanh(self.first(x[position]) + self.last(h))
        return h


@named("ragged batch")
class Ragged(Program):
    """Rows of several lengths, which arrive as a tensor and are split in Python."""

    def batch(self, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        lengths = torch.tensor([3 + (number * 7 + row * 5) % 9 for row in range(12)])
        return (drawn(number, int(lengths.sum()), WIDTH), lengths), drawn(number + 1000, 12, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(x).tanh()
        parts = torch.split(h, lengths.tolist())
        return self.last(torch.stack([part.mean(0) for part in parts]))


@named("ragged list")
class RaggedList(Program):
    """A list of tensors, each of a length of its own."""

    def batch(self, number: int) -> tuple[tuple[list[Tensor]], Tensor]:
        rows = [drawn(100 * number + row, 3 + (number + row) % 4, WIDTH) for row in range(8)]
        return (rows,), drawn(number + 1000, 8, WIDTH)

    def forward(self, rows: list[Tensor]) -> Tensor:
        return torch.stack([self.last(self.first(row).tanh()).amax(0) for row in rows])


Tree = Any
"""A leaf (an integer) or a pair of trees."""


def tree(number: int, leaves: int) -> Tree:
    """A binary tree that depends on `number`."""
    if leaves == 1:
        return number % 16
    left = 1 + (number * 7 + leaves) % (leaves - 1)
    return tree(number * 3 + 1, left), tree(number * 5 + 2, leaves - left)


@named("recursion over trees")
class Recursion(Program):
    """A recursive network over binary trees of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.Embedding(16, WIDTH)

    def batch(self, number: int) -> tuple[tuple[Tree], Tensor]:
        return (tree(number % 4, 5 + number % 4),), drawn(number, 1, WIDTH)

    def node(self, found: Tree) -> Tensor:
        """The value of a tree."""
        if isinstance(found, int):
            return self.leaves.weight[found : found + 1]
        left, right = found
        return torch.tanh(self.first(self.node(left)) + self.last(self.node(right)))

    def forward(self, found: Tree) -> Tensor:
        return self.node(found)


@named("experts in lists")
class Experts(Program):
    """Rows are sent to the expert of the largest score; how many each gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).softmax(-1)
        choice = x[:, :4].argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return self.last(out)


@named("inner loop (MAML)")
class Maml(Program):
    """Two steps of gradient descent inside the forward pass, through which the loss is differentiated."""

    def batch(self, number: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        x, y = drawn(number, 64, WIDTH), drawn(number + 1000, 64, WIDTH)
        return (x, torch.roll(x, 1, 1), y), torch.roll(y, 1, 1)

    def apply_to(self, weights: list[Tensor], x: Tensor) -> Tensor:
        """The network with other weights."""
        return torch.tanh(x @ weights[0].t()) @ weights[1].t()

    def forward(self, x: Tensor, target: Tensor, query: Tensor) -> Tensor:
        weights: list[Tensor] = [self.first.weight, self.last.weight]
        for _ in range(2):
            loss = (self.apply_to(weights, x) - target).square().mean()
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return self.apply_to(weights, query)


class Critic(Program):
    """A critic with dropout; it is smooth, so that rounding decides no slope."""

    def __init__(self) -> None:
        super().__init__()
        middle = nn.SiLU(), nn.Dropout(0.2), self.last, nn.Tanh()
        self.layers = nn.Sequential(self.first, *middle, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores

    def penalized(self, points: Tensor, scores: Tensor) -> Tensor:
        """A loss of which a part is how far the slopes at some points are from 1; they are differentiated again."""
        (slope,) = torch.autograd.grad(scores, points, torch.ones_like(scores), create_graph=True)
        return scores.square().mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


@named("gradient penalty")
class Penalty(Critic):
    """The model makes the points, and computes the loss."""

    def forward(self, x: Tensor) -> Tensor:
        share = torch.rand(BATCH, 1)
        points = (share * x + (1 - share) * x.flip(0)).requires_grad_(True)
        return self.penalized(points, self.layers(points))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output


@named("gradient penalty, outside")
class PenaltyOutside(Critic):
    """The user's code makes the points, and its loss calls for the slopes."""

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        points = drawn(number, BATCH, WIDTH).requires_grad_(True)
        return points, points

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.penalized(target, output)


class Generating(nn.Module):
    """The generator before a critic."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        self.seen_by = [critic]

    def forward(self, z: Tensor) -> Tensor:
        scores: Tensor = self.seen_by[0](self.generator(z))
        return scores


@named("GAN, changing inner steps")
class Gan(Program):
    """A least-squares GAN whose critic takes five steps at first, later two.

    A difference of means would leave the critic's biases gradients of rounding, which AdamW makes whole steps of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def parts(self) -> dict[str, tuple[nn.Module, Callable[..., Tensor]]]:
        return {
            "critic": (self.critic, lambda scores: (scores[:64] - 1).square().mean() + scores[64:].square().mean()),
            "generator": (Generating(self.generator, self.critic), lambda scores: (scores - 1).square().mean()),
        }

    def step(self, train: Train, number: int) -> Tensor:
        for inner in range(5 if number < 6 else 2):
            with torch.no_grad():
                false = self.generator(torch.randn(64, WIDTH))
            self.notes.append(train("critic", torch.cat([drawn(100 * number + inner, 64, WIDTH), false])).item())
        return train("generator", torch.randn(64, WIDTH))
