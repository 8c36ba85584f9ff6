"""What TorchDynamo keeps of a model that has gone."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import CheckFunctionManager
from torch._subclasses.fake_tensor import FakeTensorMode

from daceml_train.frontends.torch.dynamo import retention
from daceml_train.frontends.torch.dynamo.tracing import compiled


def guards() -> set[int]:
    gc.collect()
    return {id(o) for o in gc.get_objects() if type(o) is CheckFunctionManager}


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def test_guards_die_with_the_compiled_code():
    torch._dynamo.reset()
    before = guards()
    net = model(5)
    compiled(lambda x: net(x).sum(), "eager")(torch.ones(2, 4)).backward()
    assert len(guards() - before) == 1
    del net
    torch._dynamo.reset()
    assert not guards() - before


class Scale:
    """What guards identify, since it is neither a module nor a constant."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


scale = Scale()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return scale(x) + 1


def test_what_dies_invalidates_the_code_that_was_compiled_for_it(monkeypatch):
    torch._dynamo.reset()
    net = model(6)

    def call(x):
        return net(x) + 1

    compiled(call, "eager")(torch.ones(2, 4))
    assert len(_debug_get_cache_entry_list(call.__code__)) == 1
    watched = [o for o in gc.get_objects() if type(o) is CheckFunctionManager and "watched" in vars(o)]
    assert watched
    died = [reference() for manager in watched for reference in manager.watched]
    assert all(o is not None for o in died)


def test_code_is_not_run_for_an_object_that_took_the_place_of_a_dead_one():
    torch._dynamo.reset()
    module = globals()
    function = compiled(doubled, "eager")
    x = torch.ones(3)
    assert function(x).tolist() == [3, 3, 3]
    entries = len(_debug_get_cache_entry_list(doubled.__code__))
    module["scale"] = lambda x: 5 * x
    gc.collect()
    try:
        assert function(x).tolist() == [6, 6, 6]
        assert entries == 1
    finally:
        module["scale"] = Scale()


def test_results_of_fake_operators_are_bounded(monkeypatch):
    monkeypatch.setattr(retention, "REMEMBERED", 0)
    compiled(lambda x: x.sin() + 1, "eager")(torch.ones(2, 4))
    assert FakeTensorMode.cache
    retention.enter()
    retention.leave()
    assert not FakeTensorMode.cache


if __name__ == "__main__":
    pytest.main([__file__])
