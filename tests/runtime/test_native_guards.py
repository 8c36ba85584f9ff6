"""What is compared before every step without Python: identities, storages, what is attached to leaves."""

import ctypes
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from daceml_train.runtime.native_guards import GRADIENT, HOOK, IdentityGuard, Leaves, SharedStorage

pytestmark = pytest.mark.compiled


def test_gradients_and_hooks_are_seen() -> None:
    tensors = [torch.zeros(2), torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(4))]
    leaves = Leaves(tensors)
    assert leaves.attached() == 0
    tensors[2].sum().backward()
    assert leaves.attached() == GRADIENT
    tensors[2].grad = None
    assert leaves.attached() == 0
    tensors[1].register_hook(lambda g: g)
    assert leaves.attached() == HOOK


def test_hooks_after_accumulation_are_seen() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    leaves = Leaves([parameter])
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert leaves.attached() == HOOK


class Three:
    """A dictionary, a list and an empty dictionary."""

    def __init__(self) -> None:
        self.a, self.b, self.c = object(), object(), object()
        self.table: OrderedDict[str, Any] = OrderedDict(x=self.a, y=self.b)
        self.list = [self.a, self.c]
        self.hooks: defaultdict[int, Any] = defaultdict(dict)


CHANGES: dict[str, Callable[[Three], object]] = {
    "a value": lambda t: t.table.update(y=t.c),
    "an equal value": lambda t: t.table.update(y=object()),
    "a key": lambda t: t.table.update(z=t.c),
    "a key less": lambda t: t.table.pop("y"),
    "all keys": lambda t: t.table.clear(),
    "an item": lambda t: t.list.__setitem__(0, t.c),
    "an item more": lambda t: t.list.append(t.a),
    "an item less": lambda t: t.list.pop(),
    "the order of the list": lambda t: t.list.reverse(),
    "something in what was empty": lambda t: t.hooks[0],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_container_is_seen(change: str) -> None:
    three = Three()
    guard = IdentityGuard([three.table, three.list, {}], [three.hooks])
    assert guard.holds() and guard.values == [three.a, three.b, three.a, three.c]
    CHANGES[change](three)
    assert not guard.holds()


def test_what_is_put_back_is_the_same() -> None:
    three = Three()
    guard = IdentityGuard([three.table, three.list], [three.hooks])
    three.table["y"] = three.c
    assert not guard.holds()
    three.table["y"] = three.b
    three.hooks[1] = 1
    assert not guard.holds()
    del three.hooks[1]
    assert guard.holds()


def test_free_keys_may_have_any_value_and_others_not() -> None:
    group = {"lr": 0.1, "momentum": 0.9}
    guard = IdentityGuard([group], free={"lr"})
    group["lr"] = 0.2
    assert guard.holds()
    group["momentum"] = 0.8
    assert not guard.holds()


def test_a_guard_keeps_the_objects_whose_addresses_it_compares() -> None:
    table = {0: torch.zeros(3)}
    guard = IdentityGuard([table])
    for _ in range(20):
        table[0] = torch.zeros(3)  # would get the address of the first one, had that been freed
        gc.collect()
        assert not guard.holds()


def test_memory_that_tensors_exchange_is_seen() -> None:
    table, other = {0: torch.zeros(3), 1: None, 2: 4}, torch.ones(3)
    guard, free = IdentityGuard([table]), IdentityGuard([table], free=[0])
    assert guard.holds()
    torch.utils.swap_tensors(table[0], other)
    assert not guard.holds() and free.holds()
    torch.utils.swap_tensors(table[0], other)
    assert guard.holds()


def test_arguments_that_share_a_storage_are_seen() -> None:
    weight, x, y = torch.zeros(8), torch.zeros(8), torch.zeros(4)
    addresses = (ctypes.c_void_p * 3)(weight._cdata, x._cdata, y._cdata)
    shared = SharedStorage(addresses, [1, 2], [weight])
    assert not shared.found()
    part = weight[2:4]
    addresses[2] = part._cdata
    assert shared.found()
    addresses[2] = y._cdata
    assert not shared.found()
    weight.data = x  # the storage of now counts
    assert shared.found()
    assert not SharedStorage(addresses, [], [weight]).found()
