"""The choice of library for a matrix product: both ways agree, the choice is remembered, damage is survived."""

from pathlib import Path

import pytest
import torch

from daceml_train.runtime import products
from daceml_train.runtime.executor import Plan
from daceml_train.runtime.products import Product, Products


def product(rows: int = 128, inner: int = 128, columns: int = 128, bias: bool = False) -> Product:
    return Product(rows, inner, columns, (inner, 1), (1, inner), bias, torch.get_num_threads())


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
    Products(path).onednn(product(bias=True))
    assert set(Products(path).chosen) == {product().key, product(bias=True).key}


def test_a_damaged_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "products.json"
    path.write_text('{"half')
    monkeypatch.setattr(products, "measure", lambda p: False)
    monkeypatch.setattr(products, "available", lambda: True)
    assert not Products(path).onednn(product())
    assert Products(path).chosen == {product().key: False}


@pytest.mark.skipif(not products.available(), reason="this PyTorch has no oneDNN product")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["plain", "a transposed", "b transposed"])
def test_onednn_computes_the_same(layout: str, bias: bool) -> None:
    a = torch.randn(70, 50).t() if layout == "a transposed" else torch.randn(50, 70)
    b = torch.randn(60, 70).t() if layout == "b transposed" else torch.randn(70, 60)
    c = torch.randn(60)
    plan = Plan(4)
    for slot, tensor in enumerate((a, b, c)):
        plan.input_slot(slot, slot, torch.float32, tensor.shape, tensor.stride())
    plan.result_slot(3, torch.float32, (50, 60), (60, 1))
    views = [
        plan.view(0, 0, torch.float32, a.shape, a.stride()),
        plan.view(1, 0, torch.float32, b.t().shape, b.t().stride()),
        plan.view(2, 0, torch.float32, c.shape, c.stride()) if bias else None,
    ]
    plan.call("mkldnn::_linear_pointwise", "", [*views, "none", [], ""], [3])
    plan.finalize(0, [3])
    (out,) = plan.run([a, b, c])
    torch.testing.assert_close(out, a @ b + (c if bias else 0))


def test_measuring_leaves_the_thread_count() -> None:
    before = torch.get_num_threads()
    products.measure(product(16, 16, 16))
    assert torch.get_num_threads() == before
