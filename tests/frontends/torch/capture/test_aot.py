"""A module that stands in for another until it is used."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from daceml_train.frontends.torch.capture.aot import later


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "seldom_used.py").write_text("class Thing:\n    size = 3\n")
    (tmp_path / "its_user.py").write_text(
        "import seldom_used as s\ndef f(x: s.Thing) -> int:\n    return s.Thing.size\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("seldom_used", "its_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "seldom_used"


def test_it_is_imported_when_it_is_used(module: str) -> None:
    with later(module):
        its_user = importlib.import_module("its_user")
    assert module not in sys.modules
    assert its_user.f(None) == 3
    assert module in sys.modules
    with pytest.raises(AttributeError):
        _ = its_user.s.nothing


def test_what_is_there_stays(module: str) -> None:
    seldom_used = importlib.import_module(module)
    with later(module):
        its_user = importlib.import_module("its_user")
    assert its_user.s is seldom_used


@pytest.mark.compiled
def test_a_compiled_step_imports_no_networkx_and_inductor_can() -> None:
    code = """
import sys, torch, daceml_train as dt
model = torch.nn.Linear(4, 4)
step = dt.training_step(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
step(torch.ones(2, 4), torch.ones(2, 4))
from torch._functorch._activation_checkpointing import graph_info_provider
early = "networkx" in sys.modules
graph_info_provider.nx.DiGraph().add_edge(1, 2)
import networkx.algorithms
print(early, "networkx" in sys.modules, graph_info_provider.nx.DiGraph is networkx.DiGraph)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said[1:] == ["True", "True"], said
