"""The level `distribution`: what each pass makes of sums over ranks, and the bytes that it promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret_ranks
from daceml_train.analysis.links import Link, best_partitions
from daceml_train.analysis.network import messages, sent
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Role
from daceml_train.graph.text import parse, show
from daceml_train.passes.pipeline import Pipeline
from daceml_train.transformations.distribution.bucket import Bucket
from daceml_train.transformations.distribution.choose_rows import ChooseRows
from daceml_train.transformations.distribution.messages import DistributionPass
from daceml_train.transformations.distribution.shard_optimizer import ShardOptimizer
from daceml_train.transformations.pipelines import TRAINING
from tests.transformations.checking import program


def equal_on_ranks(before: Graph, after: Graph, ranks: int = 2) -> None:
    """Whether both compute the same on ranks with other data."""
    verify(after)
    assert show(parse(show(after))) == show(after)
    inputs = []
    for rank in range(ranks):
        rng = np.random.default_rng(rank)
        inputs.append({name: rng.standard_normal(e.tensor.shape) for name, e in before.inputs.items()})
        for name, entry in before.inputs.items():
            if not entry.tensor.dtype.is_float:
                inputs[-1][name] = rng.integers(0, 10, entry.tensor.shape)
    for ours, theirs in zip(*(interpret_ranks([graph] * ranks, inputs) for graph in (after, before)), strict=True):
        for found, expected in zip(ours.outputs, theirs.outputs, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def sums() -> Graph:
    return program(
        "x: f32[4], w: f32[3, 5], v: f64[2]",
        """%a = all_reduce(%x, ranks=2, of="gradient of x")
        %b = neg(%w)
        %c = all_reduce(%b, ranks=2, position=1, of="gradient of w")
        %d = all_reduce(%v, ranks=2, position=2, of="gradient of v")
        %e = exp(%a)
        %f = all_reduce(%e, ranks=2, position=3, of="norm")""",
        "%c, %d, %f",
    )


def test_sums_of_one_type_that_do_not_depend_on_each_other_are_one_message() -> None:
    before, bucket = sums(), Bucket()
    after = bucket.run(before)
    reduced = [after.tensors[node.inputs[0]] for node in after.nodes if node.op.label == "all_reduce"]
    assert [(t.shape, t.dtype.name) for t in reduced] == [((19,), "float32"), ((2,), "float64"), ((4,), "float32")]
    assert 'of="gradient of x and 1 more"' in show(after)
    equal_on_ranks(before, after)
    assert (messages(before), messages(after)) == (4, 3)
    assert bucket.promised(before) == sent(after) == sent(before)


@pytest.mark.parametrize(
    ("bucket", "count"), [(Bucket(60), 4), (Bucket(parts=2), 4), (Bucket(1), 4), (Bucket(alpha=1.0, bandwidth=1.0), 4)]
)
def test_a_bucket_is_as_large_as_its_options_say(bucket: Bucket, count: int) -> None:
    before = sums()
    after = bucket.run(before)
    equal_on_ranks(before, after)
    assert messages(after) == count


def test_options_that_are_no_sizes_are_refused() -> None:
    with pytest.raises(Invalid, match="bucket has a positive size, and no option below 0"):
        Bucket(size=0)


def table(rows: int = 6) -> Graph:
    return program(
        "g: f32[3, 2, 4], i: i64[3, 2], w: f32[5]",
        f"""%d = embedding_grad(%g, %i, rows=100)
        %a = all_reduce(%d, ranks=3, of="gradient of table", rows={rows})
        %b = all_reduce(%w, ranks=3, position=1, of="gradient of w")""",
        "%a, %b",
    )


def test_rows_of_a_table_are_exchanged_where_that_sends_less() -> None:
    before, choose = table(), ChooseRows(overhead=0)
    after = choose.run(before)
    equal_on_ranks(before, after, 3)
    assert [node.op.label for node in after.nodes if node.op.label in ("sum_rows", "embedding_grad")] == ["sum_rows"]
    assert choose.promised(before) == sent(after) == 2 * 6 * (16 + 8) + 2 * 2 * 20 // 3
    assert sent(before) == 2 * 2 * 1600 // 3 + 2 * 2 * 20 // 3


@pytest.mark.parametrize(
    ("choose", "rows"),
    [(ChooseRows(), 6), (ChooseRows(overhead=0), 60), (ChooseRows("dense"), 6), (ChooseRows("gather"), 0)],
)
def test_a_table_is_dense_where_its_rows_send_more_or_are_not_known(choose: ChooseRows, rows: int) -> None:
    before = table(rows)
    assert choose.run(before) is before and choose.promised(before) == sent(before)


def training(update: str = "%n, %m = sgd_update(%p, %s, %lr, %buffer, momentum=0.9)") -> Graph:
    graph = program(
        "p: f32[3, 5], x: f32[3, 5], lr: f64[], buffer: f32[3, 5]",
        f"""%a = all_reduce(%x, ranks=2, of="gradient of p")
        %q = mul(%a, %a)
        %t = reduce(%q, kind="sum", dims=(0, 1))
        %r = sqrt(%t)
        %s = mul(%a, %r)
        {update}""",
        "%r",
    )
    return graph


def test_the_shard_of_a_gradient_updates_the_shard_of_its_parameter() -> None:
    before = training()
    before.inputs["buffer"] = replace(before.inputs["buffer"], role=Role.state)
    before.writes = {"p": "n", "buffer": "m"}
    shard = ShardOptimizer()
    after = shard.run(before)
    verify(after)
    assert after.inputs["buffer"].tensor.shape == (8,) and after.inputs["p"].tensor.shape == (3, 5)
    kinds = [node.op.label for node in after.nodes if getattr(node.op, "ranks", 0)]
    assert kinds.count("reduce_scatter") == kinds.count("all_gather") == kinds.count("all_reduce") == 1
    # the padded shards, and the sum of squares
    assert shard.promised(before) == 2 * 8 * 4 == sent(after) - 4
    inputs, own = [], []
    for rank in range(2):
        rng = np.random.default_rng(rank)
        shared = np.random.default_rng(9)
        given = {"p": shared.standard_normal((3, 5)), "lr": np.asarray(0.1), "buffer": shared.standard_normal((3, 5))}
        inputs.append({**given, "x": rng.standard_normal((3, 5))})
        flat = np.pad(given["buffer"].reshape(-1), (0, 1))
        own.append({**inputs[-1], "buffer": flat[8 * rank : 8 * rank + 8]})
    expected, found = interpret_ranks([before] * 2, inputs), interpret_ranks([after] * 2, own)
    for theirs, ours in zip(expected, found, strict=True):
        np.testing.assert_allclose(ours.writes["p"], theirs.writes["p"], rtol=1e-12)
        np.testing.assert_allclose(ours.outputs[0], theirs.outputs[0], rtol=1e-12)
    state = np.concatenate([ours.writes["buffer"] for ours in found])[:15].reshape(3, 5)
    np.testing.assert_allclose(state, expected[0].writes["buffer"], rtol=1e-12)


def test_without_an_update_nothing_is_sharded() -> None:
    before = sums()
    assert ShardOptimizer().run(before) is before


def test_the_level_is_read_printed_edited_and_saved_as_any_other() -> None:
    assert [p.name for p in TRAINING.level("distribution")] == ["choose_rows", "bucket"]
    edited = TRAINING.before(Bucket, ShardOptimizer()).with_options(Bucket, alpha=1e-5, bandwidth=1e9)
    edited = edited.with_options(ChooseRows, how="gather")
    assert "distribution: choose_rows(how='gather'), shard_optimizer(), bucket(" in str(edited).replace('"', "'")
    assert Pipeline.parse(str(edited)) == edited == Pipeline.from_json(edited.to_json())
    assert all(isinstance(p, DistributionPass) for p in edited.level("distribution"))
    assert Pipeline.parse("forward: common_subexpressions()").level("distribution") == ()


def test_the_number_of_messages_follows_from_the_link() -> None:
    link = Link(alpha=1e-3, bandwidth=1e9)
    assert link.messages(100_000_000, 2) == 7  # sqrt(0.1 s / 2 ms)
    assert link.messages(10, 2) == 1
    assert Link(0.0, 1e9).messages(10, 2) == 10


def test_the_number_of_partitions_is_fitted_to_measured_times() -> None:
    seconds = {count: 1.0 / count + 0.01 * (count - 1) + 0.2 for count in (1, 2, 4, 8, 16, 32)}
    assert best_partitions(seconds) == 10
    assert best_partitions({1: 1.0, 2: 2.0, 4: 4.0}) == 1
    assert best_partitions({1: 1.0, 2: 0.5, 4: 0.25}) == 4
    with pytest.raises(Invalid, match="three measurements or more, given 2"):
        best_partitions({1: 1.0, 2: 2.0})
