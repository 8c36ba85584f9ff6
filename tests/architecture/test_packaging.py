"""What is installed is what is in the checkout, under one name."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import daceml_train

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
MOVED = ("transformations", "frontends")


def source_folder(package: str) -> Path:
    """Where a package's files lie in the checkout, symlinks resolved."""
    return ROOT.joinpath(*package.split(".")).resolve()


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


def test_listed_packages_are_those_found() -> None:
    def below(folder: Path, name: str) -> set[str]:
        children = [child for child in folder.iterdir() if child.is_dir() and (child / "__init__.py").exists()]
        return {name}.union(*(below(child, f"{name}.{child.name}") for child in children))

    found = sorted(below(ROOT / "daceml_train", "daceml_train"))
    assert found == PACKAGES, "edit `packages` in pyproject.toml"


def test_every_python_file_is_in_a_package() -> None:
    """A folder without `__init__.py` would work in a checkout and be missing from a wheel."""
    packaged = {source_folder(package) for package in PACKAGES}
    files = [path for folder in ("daceml_train", *MOVED) for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if path.parent.resolve() not in packaged] == []


@pytest.mark.parametrize("name", MOVED)
def test_symlinks(name: str) -> None:
    link = ROOT / "daceml_train" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"daceml_train.{name}"] == name


@pytest.mark.parametrize("name", MOVED)
def test_bare_name_is_refused(name: str) -> None:
    bare = python("-c", f"import {name}")
    assert bare.returncode != 0
    assert f"ImportError: '{name}' is the source folder of 'daceml_train.{name}'; import it" in bare.stderr
    assert python("-c", f"import daceml_train.{name}").returncode == 0


def test_no_module_hides_a_public_name() -> None:
    modules = {path.stem for path in (ROOT / "daceml_train").iterdir()}
    assert modules.isdisjoint(daceml_train.__all__)


@pytest.mark.parametrize("name", daceml_train.__all__)
def test_public_name(name: str) -> None:
    assert name in dir(daceml_train)
    home = daceml_train._HOME.get(name, "daceml_train")
    if importlib.util.find_spec(home) is None:
        pytest.skip(f"{home} is not written yet")
    module = importlib.import_module(home)
    if not [attribute for attribute in vars(module) if not attribute.startswith("__")]:
        pytest.skip(f"{home} is empty so far")
    assert getattr(daceml_train, name) is getattr(module, name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'explain'; it is daceml_train.debug.explain"):
        daceml_train.explain  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        daceml_train.optimise  # noqa: B018


def test_import_is_quick() -> None:
    """Nothing heavy is imported before a public name is used."""
    run = python("-c", "import daceml_train, sys; print(sorted({'torch', 'dace', 'numpy'} & set(sys.modules)))")
    assert run.stdout.strip() == "[]", run.stderr


def test_wheel_holds_every_source_file(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("daceml_train", *MOVED):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    built = python("-m", "pip", "wheel", ".", *offline, "--wheel-dir", "out", cwd=checkout)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = (checkout / "out").glob("*.whl")
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    in_checkout = {
        f"{package.replace('.', '/')}/{path.relative_to(source_folder(package))}"
        for package in PACKAGES
        for pattern in ("*.py", "py.typed", "native/*.h", "native/*.cuh", "native/*.cpp", "static/*.css", "static/*.js")
        for path in source_folder(package).glob(pattern)
    }
    assert in_wheel == in_checkout
