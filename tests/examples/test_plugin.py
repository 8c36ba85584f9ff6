"""The example plugin, installed into an environment of its own, and plugins that go wrong."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"

TRAIN = """
import torch
import daceml_train as dt
from daceml_train.graph.text import parse
from daceml_train.passes.registry import registered

assert "daceml_train_example" not in __import__("sys").modules
pipeline = dt.Pipeline.parse("intra_operator: negated_products(), decompose()\\nfusion: fuse_elementwise()")
assert parse("graph g(x: f32[4] input) {\\n  %y = softcap(%x, cap=2.0)\\n  return %y\\n}").nodes

from daceml_train_example import softcap

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
    def forward(self, x):
        return softcap((-x) * (-self.linear(x)).sum(), cap=3.0)

steps = []
torch.manual_seed(0)  # sums of other numbers may cancel, which float32 shows
model = Model()
step = dt.training_step(model, lambda y: y.square().sum(), torch.optim.SGD(model.parameters(), lr=0.1),
                        keep_gradients=True, pipeline=pipeline, pass_callback=steps.append)
x = torch.randn(5, 8)
expected = (3 * torch.tanh((x * model.linear(x).sum()) / 3)).square().sum()
gradient, = torch.autograd.grad(expected, [model.linear.weight])
torch.testing.assert_close(step(x), expected.detach())
torch.testing.assert_close(model.linear.weight.grad, gradient)
assert not step.breaks, step.breaks
assert steps[0].transformation.name == "negated_products", steps
print("well")
"""


def run(python: Path | str, code: str, *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0 or not check, done.stderr
    return done


@pytest.mark.compiled
@pytest.mark.slow
def test_the_example_in_an_environment_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    source = tmp_path / "plugin"  # builds leave files
    subprocess.run(["cp", "-r", str(PLUGIN), str(source)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, "--no-build-isolation", str(source)], check=True)
    assert run(python, TRAIN, PYTHONPATH="").stdout.strip() == "well"
    message = run(
        python, "from daceml_train.cli.doctor import plugins\nprint(*plugins(), sep='\\n')", PYTHONPATH=""
    ).stdout
    assert "plugin softcap (daceml_train_example.softcap) of daceml_train_example 0.1.0" in message
    assert "plugin negated_products" in message


def installed(folder: Path, group: str, name: str, code: str) -> None:
    """A package `name` in `folder` whose module of that name is a plugin of a group."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n")


def test_a_plugin_that_fails_to_load_is_reported_and_skipped(tmp_path: Path) -> None:
    installed(tmp_path, "daceml_train.passes", "broken_one", "import nothing_of_this_name")
    code = """
import warnings
import daceml_train as dt
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert dt.Pipeline.parse("fusion: simplify").level("fusion")
    from daceml_train.passes.registry import registered
    assert "simplify" in registered() and "simplify" in registered()
print(*[str(w.message) for w in said], sep="\\n")
from daceml_train.cli.doctor import plugins
try:
    print(list(plugins()))
except Exception as error:
    print(error)
"""
    lines = run(sys.executable, code, PYTHONPATH=f"{ROOT}:{tmp_path}").stdout.splitlines()
    reason = "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert lines[0] == f"plugin 'broken_one' (broken_one) of broken_one 1.0 is skipped: {reason}"
    assert lines[1:] == [f"plugin broken_one (broken_one) of broken_one 1.0 does not load: {reason}"]


TWICE = """
from dataclasses import dataclass
from daceml_train.passes import Pass
@dataclass(frozen=True)
class Simplify(Pass):
    level = "fusion"
    def run(self, graph):
        return graph
"""


def test_a_name_that_is_taken_raises_and_names_both_owners(tmp_path: Path) -> None:
    installed(tmp_path, "daceml_train.passes", "second_one", TWICE)
    code = "import daceml_train as dt, torch\ndt.optimize(torch.nn.ReLU())"
    done = run(sys.executable, code, check=False, PYTHONPATH=f"{ROOT}:{tmp_path}")
    ours = "daceml_train.transformations.intra_operator.simplify.Simplify"
    assert f"Duplicate: pass 'simplify' is defined twice: by {ours} and by second_one.Simplify" in done.stderr
    assert "while loading plugin 'second_one'" in done.stderr


def test_the_pass_is_as_short_as_is_said() -> None:
    tree = ast.parse((PLUGIN / "daceml_train_example" / "negated_products.py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert kind.end_lineno is not None
    assert kind.end_lineno - kind.decorator_list[0].lineno + 1 <= 25
