"""What every test runs under: one cache folder per session, fixed seeds, few threads, golden texts written under one flag."""

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = "DACEML_TRAIN_CACHE"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write golden texts instead of comparing them")
    parser.addoption("--browser", action="store", help="run what is marked browser, too, in this Chromium")
    parser.addoption("--wide", action="store_true", help="run what is marked wide, too")


def pytest_configure(config: pytest.Config) -> None:
    """Name the session's cache folder before any test module is imported; xdist's workers inherit it.

    It begins with the native executor of the user's cache, which `make setup` has built, and with nothing else.
    """
    if config.getoption("refresh_golden"):
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--refresh-golden rewrites files: run it without -n")
        os.environ["EXPECTTEST_ACCEPT"] = "1"
    if not hasattr(config, "workerinput"):
        users = os.environ.get(CACHE) or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/daceml_train"
        folder = tempfile.mkdtemp(prefix="daceml_train-tests-")
        os.environ[CACHE] = folder
        if (built := Path(users).expanduser() / "native").is_dir():
            shutil.copytree(built, Path(folder) / "native")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unwanted = [name for name in ("wide", "browser") if not config.getoption(name)]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """The collector does not examine again what the imports have left, some 400,000 objects, at each full run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """One thread per worker when tests run in parallel; two otherwise, so that parallel code is parallel."""
    import torch

    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def seed() -> None:
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def refresh_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("refresh_golden"))


@pytest.fixture
def golden(request: pytest.FixtureRequest, refresh_golden: bool) -> Callable[..., None]:
    """`golden(text, name)` compares a text with `golden/<test module>/<name>.txt`; the name defaults to the test's."""

    def compare(text: str, name: str | None = None) -> None:
        stem = re.sub(r"[^\w.-]+", "_", name or request.node.name).strip("_")
        path = Path(request.path).parent / "golden" / Path(request.path).stem / f"{stem}.txt"
        text = text.rstrip("\n") + "\n"
        if refresh_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden text {path}; write it with: pytest {request.path} --refresh-golden")
        assert text == path.read_text(encoding="utf-8"), f"differs from {path}; if meant, run pytest --refresh-golden"

    return compare
