"""The machine's figures: plausible, kept, and measured again where they are of another machine or damaged."""

import json

import pytest

from daceml_train.runtime import roofline
from daceml_train.runtime.roofline import Machine, machine


def test_bounds() -> None:
    fast = Machine("p", 2, bandwidth=10e9, peak=100e9)
    assert fast.balance == 10
    assert fast.seconds(20e9, 10e9) == 2.0 and fast.seconds(1e9, 300e9) == 3.0


def test_measured_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(roofline, "bandwidth", lambda: measured.append("bandwidth") or 1e9)
    monkeypatch.setattr(roofline, "peak", lambda: 2e9)
    first = machine(tmp_path)
    assert machine(tmp_path) == first and measured == ["bandwidth"]
    assert machine(tmp_path, again=True) == first and len(measured) == 2
    (path,) = tmp_path.glob("roofline-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processor": "another"}))
    machine(tmp_path)
    path.write_text("{")
    machine(tmp_path)
    assert len(measured) == 4
    assert machine(None) == first  # nowhere to keep them


def test_measured() -> None:
    assert 0 < roofline.bandwidth(1 << 22) < 1e13  # how fast depends on who else is busy
    assert 0 < roofline.peak(64) < 1e14
