"""The SDFGs are valid and small, and the loops are what one would write."""

import warnings

import dace
import pytest
import torch
from dace.config import set_temporary
from dace.sdfg import infer_types

from daceml_train.codegen.cpu.schedule import BLOCKS, LANES
from daceml_train.codegen.cpu.sdfg import build
from tests.codegen import groups
from tests.codegen.running import Case, describe, kernel_of
from tests.codegen.test_families import families
from tests.codegen.test_random_groups import group


def validate(case: Case) -> dace.SDFG:
    with set_temporary("compiler", "lineinfo", value="none"):  # as where kernels are compiled
        sdfg = build(case.code.plan, "body")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested SDFGs get all sizes, also those that they do not use
        sdfg.validate()
    before = types(sdfg)
    infer_types.infer_connector_types(sdfg)
    assert types(sdfg) == before  # which is not inferred when text is generated
    for node, _ in sdfg.all_nodes_recursive():
        if isinstance(node, dace.nodes.MapEntry):
            assert node.map.schedule in (BLOCKS, LANES)
    return sdfg


def types(sdfg: dace.SDFG) -> list[tuple]:
    kinds = (dace.nodes.Tasklet, dace.nodes.NestedSDFG)
    found = [node for node, _ in sdfg.all_nodes_recursive() if isinstance(node, kinds)]
    return [(node.label, dict(node.in_connectors), dict(node.out_connectors)) for node in found]


def test_families_are_valid():
    for case in families(23, 50, 1):
        maps = [n for n, _ in validate(case).all_nodes_recursive() if isinstance(n, dace.nodes.MapEntry)]
        assert len(maps) <= 20, case.name


def test_random_groups_are_valid():
    for case in map(group, range(12)):
        if case is not None:
            validate(case)


@pytest.mark.parametrize("name", ["softmax", "layer_norm_backward", "bias_gelu"])
def test_source(name, golden):
    r = torch.randn
    x, w, m = r(8, 32), r(32), r(8, 1)
    inputs = {"softmax": [x], "layer_norm_backward": [x, x, w, m, m], "bias_gelu": [x, w]}[name]
    case = Case(name, kernel_of(getattr(groups, name), *map(describe, inputs)), inputs)
    golden(case.code.source.replace(case.code.key, "KEY"))
