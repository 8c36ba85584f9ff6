"""Programs as plain data: what comes back is what was stored, and nothing that a text names is run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import daceml_train as dt
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.lowering.program import Allocation, BufferView
from daceml_train.runtime.cache import Cache
from daceml_train.runtime.encoding import Unencodable, decode, encode
from daceml_train.storage.storable import storable
from daceml_train.tensor import DType, symbol

n, m = symbol("n"), symbol("m")
VALUES = [
    None,
    True,
    0,
    -1,
    1 << 80,
    "",
    "ü\0\n",
    1.5,
    -0.0,
    math.inf,
    1e-320,
    1 + 2j,
    b"\0\xff",
    (),
    [],
    {},
    set(),
    frozenset(),
    (1, [2.0, {"a": (None,), 3: "b", (4, 5): True}]),
    frozenset({1, 2}),
    {"x", "y"},
    torch.float32,
    torch.strided,
    torch.channels_last,
    torch.device("cuda:1"),
    DType.bfloat16,
    Allocation.arena,
    n,
    n * m + 3,
    sympy.Rational(1, 3) * n,
    sympy.floor(n / 2),
    sympy.Min(n, 5),
    sympy.Max(n, m) ** 2,
    sympy.ceiling(n / m),
    sympy.Mod(n, 7),
    sympy.Float("0.1", 30),
    sympy.Symbol("k", negative=True),
    BufferView(1, DType.float64, (n, 4), (4, 1), n - 1),
    Layout(DType.float32, (2,), (1,)),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=lambda value: f"{type(value).__name__} {sorted(value) if isinstance(value, set) else value}"
)
def test_what_comes_back_is_what_was_stored(value: Any) -> None:
    back = decode(encode(value))
    assert type(back) is type(value) and back == value
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)
    if isinstance(value, sympy.Symbol):
        assert back.assumptions0 == value.assumptions0


def test_not_a_number_and_one_object_in_two_places() -> None:
    shared = [math.nan]
    first, second = decode(encode((shared, shared)))
    assert first is second and math.isnan(first[0])


def test_an_object_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(Unencodable, match="a list contains itself"):
        encode(ring)


class Foreign:
    """A class that nobody declared."""


@pytest.mark.parametrize(
    "value", [Foreign(), print, os.system, Foreign().__init__, sympy.sin(n), sympy.pi, torch.ones(1), int]
)
def test_what_is_no_plain_data_is_refused_by_name(value: Any) -> None:
    with pytest.raises(Unencodable, match=r"not plain data|does not occur in sizes"):
        encode(value)


@pytest.mark.parametrize(
    "classes, nodes",
    [
        ([["os:system"]], [["o", 0]]),
        ([["subprocess:Popen", "args"]], [["l", "true"], ["o", 0, [0]]]),
        ([["daceml_train.tensor:DType"]], [["o", 0]]),
        ([], [["e", "os:system", "x"]]),
        ([], [["e", "daceml_train.lowering.program:Place", "x"]]),
        ([], [["torch", "save"]]),
        ([], [["torch", "hub"]]),
        ([], [["x", "sympify", "1"]]),
        ([], [["x", "lambdify", "1"]]),
        ([], [["l", 1], ["m", [0], "append"]]),
        ([], [["unknown"]]),
        ([], [["l", [1]]]),
        ([["daceml_train.lowering.program:Place", "slot"]], [["o", 0]]),
    ],
)
def test_a_text_of_other_things_is_refused(classes: Any, nodes: Any) -> None:
    with pytest.raises(Unencodable):
        decode(json.dumps([classes, nodes, [len(nodes) - 1]]).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"\xff", b"[[],[]]", pickle.dumps({"a": 1})])
def test_what_is_no_text_is_refused(text: bytes) -> None:
    with pytest.raises(Unencodable):
        decode(text)


def test_a_cache_entry_that_cannot_be_stored_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="compiles a program in each process.*Foreign"):
        Cache(tmp_path).store("key", Foreign())
    assert Cache(tmp_path).load("key") is None


@storable
@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """Has no dictionary."""

    a: int
    b: tuple[int, ...] = ()


def test_an_object_without_a_dictionary() -> None:
    assert decode(encode(Slotted(1, (2, 3)))) == Slotted(1, (2, 3))


class Net(nn.Module):
    """Convolution, normalization, attention, embedding, dropout: kernels and calls of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)
        self.out, self.table = nn.Linear(4, 6), nn.Embedding(5, 6, sparse=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = self.out(self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))) + self.table(i)
        return self.attention(y[None], y[None], y[None])[0].softmax(-1)


def equal(a: Any, b: Any) -> bool:
    """Whether two values have the same types and fields, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and equal(a.__self__, b.__self__)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if (
        hasattr(a, "__dict__")
        and not isinstance(a, DType | Allocation)
        and type(a).__module__.startswith("daceml_train")
    ):
        return equal(vars(a), vars(b))
    return bool(a == b)


def test_programs_of_every_kind_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[Any, Any]] = []
    store = Cache.store

    def watched(cache: Cache, key: str, entry: Any) -> None:
        store(cache, key, entry)
        stored.append((pickle.loads(pickle.dumps(entry)), cache.load(key)))

    monkeypatch.setattr(Cache, "store", watched)
    for model in models():
        optimized = dt.optimize(model, cache=tmp_path)
        for count in (4, 6):
            optimized(torch.randn(count, 3, 8, 8), torch.randint(0, 5, (count,))).sum().backward()
        with torch.no_grad():
            dt.optimize(model.eval(), cache=tmp_path)(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))
    assert len(stored) >= 3
    for before, after in stored:
        assert after is not None and equal(before, after)
        assert [c.source for p in programs(before) for c in p.codes] == [
            c.source for p in programs(after) for c in p.codes
        ]


test_programs_of_every_kind_come_back_whole = pytest.mark.compiled(test_programs_of_every_kind_come_back_whole)


def models() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield Net()


def programs(entry: Any) -> list[Any]:
    return [p for value in vars(entry).values() if type(value).__name__ == "Program" for p in value.all]
