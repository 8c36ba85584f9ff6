"""What holds for every pass: it describes itself, and works one match at a time with promised bytes = measured ones."""

import functools
from collections import defaultdict

import pytest

from daceml_train.analysis.traffic import Known, traffic
from daceml_train.analysis.verify import verify
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse
from daceml_train.passes.base import LEVELS
from daceml_train.passes.options import fits, option_types
from daceml_train.tensor import simplify
from daceml_train.transformations import catalog
from daceml_train.transformations.pipelines import TRAINING
from tests.passes.training_graphs import stages
from tests.transformations.checking import program

OURS = {name: kind for name, kind in catalog.passes().items() if kind.__module__.startswith("daceml_train.")}
NETWORKS = ("mlp", "lstm", "post_ln", "mixer", "resnet")
MATCHES = 3
"""Matches looked at per graph."""


@pytest.mark.parametrize("network", NETWORKS)
def test_entries_of_unchanged_nodes_are_those_of_a_fresh_count(network: str) -> None:
    known = Known()
    kept = 0
    for _, graph in stages(network):
        before = {name: entry for name, (*_, entry) in known.entries.items()}
        counted = traffic(graph, known=known)
        assert counted == traffic(graph)
        kept += sum(before.get(name) is entry for name, (*_, entry) in known.entries.items())
    assert kept > 20 * len(known.entries)


EXTRA = {
    "accumulate_rows": program(
        "g: f32[5, 4], i: i64[5], a: f32[90, 3], b: f32[3, 4]",
        "%c = matmul(%a, %b)\n%d = embedding_grad(%g, %i, rows=90)\n%y = add(%c, %d)",
        "%y",
    ),
    "assemble_slices": program(
        "g: f32[2, 8], h: f32[3, 8]",
        "%a = pad(%g, pads=((0, 5), (0, 0)))\n%b = pad(%h, pads=((3, 1), (0, 0)))\n%y = add(%a, %b)",
        "%y",
    ),
    "bucket": program(
        "x: f32[4], y: f32[3]",
        '%a = all_reduce(%x, ranks=2, of="gradient of p")\n%b = all_reduce(%y, ranks=2, position=1, of="gradient of q")',
        "%a, %b",
    ),
    "choose_rows": program(
        "g: f32[3, 4], i: i64[3]",
        '%d = embedding_grad(%g, %i, rows=9000)\n%a = all_reduce(%d, ranks=2, of="gradient of p", rows=3)',
        "%a",
    ),
    "shard_optimizer": program(
        "p: f32[9], g: f32[9], rate: f64[]",
        '%a = all_reduce(%g, ranks=2, of="gradient of p")\n%n = sgd_update(%p, %a, %rate)',
        "%n",
    ),
    "overlap": program(
        "x: f32[4], w: f32[4, 4]",
        "%a = all_reduce(%x, ranks=2)\n%b = neg(%a)\n%c = matmul(%w, %w)\n%d = all_reduce(%c, ranks=2, position=1)\n%y = exp(%d)",
        "%b, %y",
    ),
    "at_place": program("x: f32[4]", "%a = neg(%x)\n%b = neg(%a)\n%y = exp(%b)", "%y"),
    "blocked_attention": program(
        "q: f32[2, 3, 5, 4], k: f32[2, 3, 7, 4], v: f32[2, 3, 7, 4]",
        "%y, %l = attention(%q, %k, %v)\n%t = permute(%y, dims=(0, 2, 1, 3))\n%z = view(%t, shape=(2, 5, 12))",
        "%z",
    ),
    "fuse_matmul_epilogue": program(
        "x: f32[5, 8], p: f32[1, 8, 32], o: f32[5, 32]",
        "%s = packed_matmul(%x, %p, columns=32)\n%y = add(%s, %o)",
        "%y",
    ),
    "pack_weights": parse(
        """graph test(x: f32[2, 16, 4, 3]@0231 input, w: f32[8, 16, 3, 3] parameter, b: f32[8] parameter) {
          %y = convolution(%x, %w, %b, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))
          return %y
        }"""
    ),
    "convolution_as_matmul": program(
        "x: f32[1, 64, 4, 4], w: f32[128, 64, 3, 3]",
        "%y = convolution(%x, %w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))",
        "%y",
    ),
    "winograd_convolution": program(
        "x: f32[8, 16, 10, 9]@0231, w: f32[32, 16, 3, 3]",
        "%v = reorder(%w, order=(0, 2, 3, 1))\n"
        "%y = convolution(%x, %v, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))",
        "%y",
    ),
    "concatenate_transposed": program(
        "a: f32[1, 2, 3, 4], b: f32[1, 2, 3, 4], w: f32[24, 5]",
        "%y = concat(%a, %b, dim=0)\n%p = permute(%y, dims=(1, 0, 2, 3))\n%v = view(%p, shape=(2, 24))\n%z = matmul(%v, %w)",
        "%z",
    ),
    "dead_code": program("x: f32[4]", "%a = exp(%x)\n%b = neg(%x)", "%b"),
    "factor_matmuls": program(
        "a: f32[4, 3, 3], b: f32[4, 3, 16]",
        "%t = permute(%a, dims=(0, 2, 1))\n%p = matmul(%a, %b)\n%y = matmul_add(%p, %t, %b)",
        "%y",
    ),
    "fold_batch_norm": program(
        "x: f32[2, 3, 8, 8], w: f32[4, 3, 3, 3] parameter, mean: f32[4] buffer, var: f32[4] buffer",
        "%y = convolution(%x, %w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))\n"
        "%z = batch_norm_inference(%y, %mean, %var)",
        "%z",
    ),
    "merge_batch": program(
        "x: f32[2, 3, 4], w: f32[4, 5]",
        "%a = view(%w, shape=(1, 4, 5))\n%b = expand(%a, shape=(2, 4, 5))\n%y = matmul(%x, %b)",
        "%y",
    ),
    "merge_summed_batch": program(
        "x: f32[2, 3, 4], g: f32[2, 3, 5]",
        '%t = permute(%x, dims=(0, 2, 1))\n%p = matmul(%t, %g)\n%y = reduce(%p, kind="sum", dims=(0,))',
        "%y",
    ),
    "rematerialize": program(
        "x: f32[64]",
        '%a = exp(%x)\n%b = sin(%a)\n%c = cos(%b)\n%l = reduce(%c, kind="sum", dims=(0,))\n'
        "%d = mul(%c, %l)\n%e = mul(%d, %b)\n%f = mul(%e, %a)",
        "%l, %f",
    ),
    "rematerialize_cheap": program(
        "x: f32[512, 1024], w: f32[1024, 1024]",
        '%a = exp(%x)\n%y = matmul(%a, %w)\n%z = matmul(%y, %w)\n%l = reduce(%z, kind="sum", dims=(0, 1))\n'
        "%d = mul(%z, %l)\n%e = matmul(%d, %w)\n%f = matmul(%e, %w)\n%g = mul(%f, %a)\n"
        '%h = reduce(%g, kind="sum", dims=(0, 1))',
        "%l, %h",
    ),
    "mixed_precision": program(
        "x: f32[64, 64], w: f32[64, 64] parameter",
        "%a = exp(%x)\n%t = permute(%w, dims=(1, 0))\n%y = matmul(%a, %t)\n%z = add(%y, %a)",
        "%z",
    ),
    "compress_saved": program(
        "x: f32[256, 128], p: f32[256, 128] parameter",
        '%a = exp(%x)\n%l = reduce(%a, kind="sum", dims=(0, 1))\n%d = mul(%a, %l)',
        "%l",
    ),
    "chunk_updates": program(
        "p: f32[4096, 1024], a: f32[4096, 2], b: f32[2, 1024]",
        """
        %d = matmul(%a, %b)
        %q = kernel(x0=%p, x1=%d) {
          %v0 = sub(%x0, %x1)
          yield %v0 over %x0
        }
        write p <- %q
        """,
    ),
    "update_rows": program(
        "p: f32[90, 4], g: f32[5, 4], i: i64[5], rate: f64[]",
        "%d = embedding_grad(%g, %i, rows=90)\n%n = sgd_update(%p, %d, %rate)",
        "%n",
    ),
}
"""Pass -> a graph for it, where the networks have none."""
EXTRA["compress_saved"].write("p", EXTRA["compress_saved"].value("d"))


@functools.cache
def graphs() -> dict[type, list[Graph]]:
    """Pass class -> graphs that it meets in a pipeline, with one of another network each."""
    met: dict[type, list[Graph]] = defaultdict(list)
    for network in NETWORKS:
        for kind, graph in stages(network):
            met[kind].append(graph)
    for name, graph in EXTRA.items():
        met[OURS[name]].append(graph)
    return met


@pytest.mark.parametrize("name", OURS)
def test_a_pass_describes_itself(name: str) -> None:
    kind = OURS[name]
    told = kind.describe()
    assert told.name == name
    assert told.level in LEVELS
    assert "=>" in told.picture, f"{name} draws no picture"
    assert told.summary
    assert told.summary.endswith(".")
    result = kind()
    for option, annotation in option_types(kind).items():
        assert fits(getattr(result, option), annotation)
        assert option in str(told)


@pytest.mark.parametrize("name", OURS)
def test_one_match_at_a_time(name: str) -> None:
    kind, found = OURS[name], 0
    assert kind in graphs(), f"no pipeline of the tests holds {name}"
    for graph in graphs()[kind]:
        text = str(graph)
        matches = kind().matches(graph)
        for match in [m for m in matches if m.refusal is None][:MATCHES]:
            found += 1
            after = match.apply()
            verify(after)
            measured = simplify(traffic(after).bytes - traffic(graph).bytes)
            assert simplify(match.traffic) == measured, f"{name} at {match.where}"
            assert match.transformation == kind()
            assert set(match.arrays) <= set(graph.tensors)
        for match in [m for m in matches if m.refusal is not None][:1]:
            with pytest.raises(Refused, match="at "):
                match.apply()
        assert str(graph) == text
        if found >= 2 * MATCHES:
            break
    assert found, f"{name} matches nothing in {NETWORKS}"


def test_the_graphs_are_those_of_the_pipeline() -> None:
    assert {type(p) for p in TRAINING} <= set(graphs())
