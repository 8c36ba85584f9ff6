"""The choice of library for a matmul: both ways agree, the choice is remembered, damage is survived."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from daceml_train.runtime import machine_load, tune_matmul
from daceml_train.runtime.tune_matmul import Added, MatmulShape, MatmulTuner, planned


def product(rows: int = 128, inner: int = 128, columns: int = 128, added: Added = "nothing") -> MatmulShape:
    return MatmulShape(rows, inner, columns, (inner, 1), (1, inner), added, torch.get_num_threads())


def test_small_products_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_matmul, "measure", lambda product: pytest.fail("measured"))
    assert MatmulTuner().way(product(8, 8, 8)) == "blas"


def test_of_a_large_product_a_part_is_measured() -> None:
    logits = MatmulShape(512, 768, 50257, (768, 1), (1, 768), "nothing", 1)
    part = logits.part()
    assert (part.a, part.b) == ((part.inner, 1), (1, part.inner))
    assert tune_matmul.LARGEST / 4 < part.rows * part.inner * part.columns <= tune_matmul.LARGEST
    assert part.part() == part
    turned = replace(logits, a=(1, 512), b=(50257, 1)).part()
    assert (turned.a, turned.b) == ((1, turned.rows), (turned.columns, 1))
    assert product().part() == product()
    with_gaps = replace(logits, a=(1024, 1))
    assert with_gaps.part() == with_gaps


def test_a_clear_difference_is_measured_twice_and_a_small_one_again() -> None:
    def measured(slower: float) -> int:
        runs: list[str] = []
        tune_matmul._alternate([lambda: runs.append("a"), lambda: (runs.append("b"), time.sleep(slower))])
        return runs.count("b")

    assert measured(1e-3) == 1 + 2  # one to warm up
    assert measured(tune_matmul.ENOUGH) == 1 + 1


def test_a_choice_is_made_once_and_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)
    measured: list[MatmulShape] = []
    monkeypatch.setattr(tune_matmul, "available", lambda: True)
    monkeypatch.setattr(tune_matmul, "measure", lambda p: measured.append(p) or "onednn")
    path = tmp_path / "products.json"
    first = MatmulTuner(path)
    assert first.way(product()) == first.way(product()) == "onednn"
    assert MatmulTuner(path).way(product()) == "onednn"
    assert len(measured) == 1
    MatmulTuner(path).way(product(added="row"))
    assert set(MatmulTuner(path).chosen) == {product().key, product(added="row").key}


def test_a_choice_under_load_is_made_again_by_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["onednn", "blas", "onednn"])
    monkeypatch.setattr(tune_matmul, "available", lambda: True)
    monkeypatch.setattr(tune_matmul, "measure", lambda p: next(answers))
    clock = itertools.count()
    monkeypatch.setattr(machine_load, "waited", lambda: 1.0 * next(clock))
    path = tmp_path / "products.json"
    first = MatmulTuner(path)
    assert first.way(product()) == first.way(product()) == "onednn"
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)
    assert MatmulTuner(path).way(product()) == MatmulTuner(path).way(product()) == "blas"


def test_a_shared_choice_is_that_of_the_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under load, and also for one that had looked into the file before: bits depend on it, not time alone."""
    answers = iter(["onednn", "blas"])
    monkeypatch.setattr(tune_matmul, "available", lambda: True)
    monkeypatch.setattr(tune_matmul, "measure", lambda p: next(answers))
    clock = itertools.count()
    monkeypatch.setattr(machine_load, "waited", lambda: 1.0 * next(clock))
    path = tmp_path / "of a search" / "matmuls.json"
    first, second = MatmulTuner(path, shared=True), MatmulTuner(path, shared=True)
    assert first.way(product()) == second.way(product()) == MatmulTuner(path, shared=True).way(product()) == "onednn"
    assert second.way(product(added="row")) == first.way(product(added="row")) == "blas"


def test_a_choice_is_that_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {product().key}
    monkeypatch.setattr(tune_matmul, "machine", lambda: "another one")
    assert product().key not in keys


@pytest.mark.parametrize("damage", ['{"half', "[1]", '{"key": true}'])
def test_a_damaged_file_is_replaced(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "waited", lambda: 0.0)
    path = tmp_path / "products.json"
    path.write_text(damage)
    monkeypatch.setattr(tune_matmul, "measure", lambda p: "blas")
    monkeypatch.setattr(tune_matmul, "available", lambda: True)
    assert MatmulTuner(path).way(product()) == "blas"
    assert MatmulTuner(path).chosen == {product().key: "blas"}


@pytest.mark.skipif(not tune_matmul.available(), reason="this PyTorch has no oneDNN product")
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "result"])
@pytest.mark.parametrize("layout", ["plain", "a transposed", "b transposed"])
def test_onednn_computes_the_same(layout: str, added: Added) -> None:
    a = torch.randn(70, 50).t() if layout == "a transposed" else torch.randn(50, 70)
    b = torch.randn(60, 70).t() if layout == "b transposed" else torch.randn(70, 60)
    c = {"nothing": None, "row": torch.randn(60)}.get(added, torch.randn(50, 60))
    expected = a @ b + (0 if c is None else c)
    results = planned(a, b, c, added)()
    torch.testing.assert_close(c if added == "result" else results[0], expected)


@pytest.mark.skipif(not tune_matmul.available(), reason="this PyTorch has no oneDNN product")
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "result"])
def test_both_ways_are_measured(added: Added) -> None:
    assert tune_matmul.measure(MatmulShape(64, 64, 64, (1, 64), (64, 1), added, 1)) in get_args(tune_matmul.Way)


def test_measuring_leaves_the_thread_count() -> None:
    before = torch.get_num_threads()
    tune_matmul.measure(product(16, 16, 16))
    assert torch.get_num_threads() == before
