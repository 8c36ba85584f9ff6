"""Old names are understood, each with a warning that names the new one."""

import importlib
import subprocess
import sys

import pytest

import daceml_train as dt
from daceml_train import renamed
from daceml_train.passes import Rewrite
from daceml_train.passes.registry import find
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from tests.transformations.checking import program

PACKAGES = {"exploration.widget", "exploration.export", "exploration.session", "frontends.torch.capture"}


def test_pipelines_are_read_under_both_names() -> None:
    with pytest.warns(DeprecationWarning, match="the pass merge_equal is called common_subexpressions now"):
        old = dt.Pipeline.parse("forward: merge_equal()")
    assert (
        old == dt.Pipeline.parse("forward: common_subexpressions()") == dt.Pipeline(forward=(CommonSubexpressions(),))
    )


def test_every_old_pass_has_a_new_one() -> None:
    for old, new in renamed.PASSES.items():
        with pytest.warns(DeprecationWarning, match=new):
            assert find(old) is find(new)


def test_old_modules_are_importable() -> None:
    """In a process of its own: each warns at the import, and has what the new one has under its old name."""
    script = """
import importlib, warnings
from daceml_train import renamed
for old, new in renamed.MODULES.items():
    if old in PACKAGES or old.startswith("backends."):
        continue
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        module = importlib.import_module("daceml_train." + old)
    assert any(f"daceml_train.{new}" in str(w.message) for w in caught), (old, [str(w.message) for w in caught])
    target = importlib.import_module("daceml_train." + new)
    for one, other in renamed.SYMBOLS.get(old, {}).items():
        assert getattr(module, one) is getattr(target, other), (old, one)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"PACKAGES = {PACKAGES}\n{script}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["Session", "replay", "compare"])
def test_packages_that_were_modules(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="exploration.session.session"):
        value = getattr(importlib.import_module("daceml_train.exploration.session"), name)
    assert value is getattr(importlib.import_module("daceml_train.exploration.session.session"), name)
    with pytest.raises(AttributeError, match="nothing"):
        importlib.import_module("daceml_train.exploration.session").nothing  # noqa: B018


def test_rewrites_with_the_old_methods() -> None:
    with pytest.warns(DeprecationWarning, match="the method find of _Old is called match now"):

        class _Old(Rewrite):
            level = "intra_operator"

            def find(self, view, node):
                return {"x": node.inputs[0]}

            def legality(self, match):
                with pytest.warns(DeprecationWarning, match="bindings"):
                    assert match.parts["x"] == "x"
                with pytest.warns(DeprecationWarning, match="uses"):
                    assert match.view.graph is match.uses.graph
                yield False, "it is a test"

            def emit(self, match, builder, now):
                raise AssertionError

    [match] = _Old().matches(program("x: f32[4]", "%y = neg(%x)", "%y"))
    assert match.refusal == "it is a test"


def test_a_module_of_a_package_that_was_a_module_is_imported_by_itself() -> None:
    """Not by way of the old module's names, whose import would go in a circle."""
    imports = "from daceml_train.frontends.torch.capture import decompositions, foreach; foreach.decompositions"
    done = subprocess.run([sys.executable, "-W", "error", "-c", imports], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
