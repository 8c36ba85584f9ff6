"""What TorchDynamo keeps of a model that has gone."""

import gc
import linecache

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

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
    compiled(model(5).forward, "eager")(torch.ones(2, 4)).sum().backward()
    assert len(guards() - before) == 1
    torch._dynamo.reset()
    assert not guards() - before


class Scale:
    """What guards identify, since it is neither a module nor a constant."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


scale = Scale()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return scale(x) + 1


def test_code_is_invalid_once_what_its_guards_identify_has_died():
    torch._dynamo.reset()
    holder = [type("Double", (), {"factor": 2})]

    def call(x):
        return holder[0].factor * x + 1

    function = compiled(call, "eager")
    assert function(torch.ones(2)).tolist() == [3, 3]
    watched = [o.watched for o in gc.get_objects() if type(o) is CheckFunctionManager and "watched" in vars(o)]
    assert any(reference() is holder[0] for references in watched for reference in references)
    (entry,) = _debug_get_cache_entry_list(call.__code__)
    assert not isinstance(entry.guard_manager, DeletedGuardManagerWrapper)
    del watched
    holder.clear()
    gc.collect()
    (entry,) = _debug_get_cache_entry_list(call.__code__)
    assert isinstance(entry.guard_manager, DeletedGuardManagerWrapper)


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
    with retention.traces:
        pass
    assert not FakeTensorMode.cache


def test_sources_of_generated_code_are_bounded(monkeypatch):
    monkeypatch.setattr(retention, "SOURCES", 3)
    texts = graph_module._loader.eval_cache
    mine = fx.symbolic_trace(nn.ReLU()).forward.__code__.co_filename  # of no trace of ours
    for number in range(6):
        torch._dynamo.reset()
        compiled(lambda x, n=number: x.sin() + n, "eager")(torch.ones(2, 4))
    kept = list(texts)[list(texts).index(mine) + 1 :]
    assert 0 < len(kept) <= 3
    assert not [name for name in linecache.cache if name.startswith("<eval_with_key>") and name not in texts]
