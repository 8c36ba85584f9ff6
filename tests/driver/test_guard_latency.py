"""Guards are timed for other backends of `torch.compile`, not for ours."""

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.frontends.torch.dynamo import guard_latency


def test_guards_of_our_traces_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []
    monkeypatch.setattr(guard_latency, "measure", lambda manager, *_: timed.append(manager) or 1.0)
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    torch.testing.assert_close(dt.optimize(module)(x), module(x))
    assert not timed
    torch.compile(module, backend="eager")(x)
    assert timed
