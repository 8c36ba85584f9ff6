"""Real data that comes with installed packages: scikit-learn's digits and the text of Python's standard library."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MODULES = (
    "argparse",
    "ast",
    "asyncio.base_events",
    "calendar",
    "collections",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "email.message",
    "enum",
    "functools",
    "heapq",
    "inspect",
    "ipaddress",
    "json.decoder",
    "logging",
    "pathlib",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "typing",
    "unittest.case",
    "zipfile",
)
"""Modules of the standard library whose sources are the text; one that an installation lacks is left out."""


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] with values about 0 to 1, labels 0 to 9, and a held-out part for testing."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self, count: int, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
        """`count` batches of training images, in a new order each time all have been seen; a rest is left out."""
        generator = torch.Generator().manual_seed(0)
        result = 0
        while result < count:
            order = torch.randperm(len(self.images), generator=generator)
            for part in order.split(size)[: min(count - result, len(order) // size)]:
                result += 1
                yield self.images[part], self.labels[part]


def digits() -> Digits:
    """scikit-learn's digits (Alpaydin & Kaynak, 1998): a fifth, drawn evenly over the classes, is for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    images, test_images = (torch.tensor(p, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for p in parts[:2])
    return Digits(images, torch.tensor(parts[2]), test_images, torch.tensor(parts[3]))


@dataclass(frozen=True)
class Text:
    """A text as numbers of characters in `alphabet`, and from how many modules it comes."""

    characters: Tensor
    alphabet: str
    modules: int

    def batches(self, count: int, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`count` batches of `size` stretches of the text, and each stretch one character later."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            starts = torch.randint(0, len(self.characters) - length - 1, (size,), generator=generator)
            stretches = torch.stack([self.characters[s : s + length + 1] for s in starts.tolist()])
            yield stretches[:, :-1].contiguous(), stretches[:, 1:].contiguous()


def standard_library() -> Text:
    """The sources of `MODULES`, without characters beyond ASCII: the alphabet is the same on every machine."""
    alphabet = "\n" + "".join(map(chr, range(32, 127)))
    known = {c: i for i, c in enumerate(alphabet)}
    numbers: list[int] = []
    found = 0
    for name in MODULES:
        try:
            source = inspect.getsource(importlib.import_module(name))
        except (ImportError, OSError):
            continue
        found += 1
        numbers += [known[c] for c in source if c in known]
    return Text(torch.tensor(numbers), alphabet, found)
