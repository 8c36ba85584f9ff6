"""The choice of library for a matrix product: both ways agree, the choice is remembered, damage is survived."""

from pathlib import Path

import pytest
import torch

from daceml_train.runtime import products
from daceml_train.runtime.executor import Plan
from daceml_train.runtime.products import Added, Product, Products, onednn_call


def product(rows: int = 128, inner: int = 128, columns: int = 128, added: Added = "nothing") -> Product:
    return Product(rows, inner, columns, (inner, 1), (1, inner), added, torch.get_num_threads())


def test_small_products_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure", lambda product: pytest.fail("measured"))
    assert not Products().onednn(product(8, 8, 8))


def test_a_choice_is_made_once_and_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Product] = []
    monkeypatch.setattr(products, "available", lambda: True)
    monkeypatch.setattr(products, "measure", lambda p: measured.append(p) or True)
    path = tmp_path / "products.json"
    first = Products(path)
    assert first.onednn(product()) and first.onednn(product())
    assert Products(path).onednn(product())
    assert len(measured) == 1
    Products(path).onednn(product(added="row"))
    assert set(Products(path).chosen) == {product().key, product(added="row").key}


def test_a_damaged_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "products.json"
    path.write_text('{"half')
    monkeypatch.setattr(products, "measure", lambda p: False)
    monkeypatch.setattr(products, "available", lambda: True)
    assert not Products(path).onednn(product())
    assert Products(path).chosen == {product().key: False}


@pytest.mark.skipif(not products.available(), reason="this PyTorch has no oneDNN product")
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "result"])
@pytest.mark.parametrize("layout", ["plain", "a transposed", "b transposed"])
def test_onednn_computes_the_same(layout: str, added: Added) -> None:
    a = torch.randn(70, 50).t() if layout == "a transposed" else torch.randn(50, 70)
    b = torch.randn(60, 70).t() if layout == "b transposed" else torch.randn(70, 60)
    c = torch.randn(60) if added == "row" else torch.randn(50, 60)
    expected = a @ b + (c if added != "nothing" else 0)
    plan = Plan(4)
    for slot, tensor in enumerate((a, b, c)):
        plan.input_slot(slot, slot, torch.float32, tensor.shape, tensor.stride(), mutable=added == "result" and slot == 2)
    if added != "result":
        plan.result_slot(3, torch.float32, (50, 60), (60, 1))
    x, y, z = (plan.view(i, 0, torch.float32, t.shape, t.stride()) for i, t in enumerate((a, b.t(), c)))
    overload, arguments = onednn_call(x, y, z if added != "nothing" else None, added)
    plan.call("mkldnn::_linear_pointwise", overload, arguments, [z if added == "result" else 3])
    plan.finalize(0, [] if added == "result" else [3])
    made = plan.run([a, b, c])
    torch.testing.assert_close(c if added == "result" else made[0], expected)


@pytest.mark.skipif(not products.available(), reason="this PyTorch has no oneDNN product")
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "result"])
def test_both_ways_are_measured(added: Added) -> None:
    assert products.measure(product(64, 64, 64, added)) in (True, False)


def test_measuring_leaves_the_thread_count() -> None:
    before = torch.get_num_threads()
    products.measure(product(16, 16, 16))
    assert torch.get_num_threads() == before
