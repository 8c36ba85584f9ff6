"""Gradients that exist in parts: the same numbers in less memory, and why a matmul stays whole."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.analysis.chunks import chunks_of
from daceml_train.analysis.memory import memory
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.lowering.cost import costs
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CallLaunch
from daceml_train.ops.contraction import Matmul
from daceml_train.passes.base import Pass, checked
from daceml_train.passes.pipeline import Pipeline, Step
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from daceml_train.transformations.global_movement.chunk_updates import ChunkUpdates
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from tests.analysis.test_memory import check_model
from tests.lowering.test_lower import check
from tests.transformations.checking import check_same, program

SMALL = ChunkUpdates(part=3 * 5 * 4, min_bytes=0)
"""Parts of three rows of five."""
UPDATE = """
%d = matmul(%a, %b)
%k = full(value=0.5)
%s = mul(%m, %k)
%n = add(%s, %d)
%h = mul(%n, %r)
%q = sub(%p, %h)
write p <- %q
write m <- %n
"""
SIGNATURE = "p: f32[8, 5], m: f32[8, 5], r: f32[5], a: f32[8, 4], b: f32[4, 5]"


def updated(signature: str = SIGNATURE, body: str = UPDATE, result: str = "") -> Graph:
    """The graph as it is before the pass."""
    return ReuseOperands(min_bytes=0).run(UpdateInPlace().run(FuseElementwise().run(program(signature, body, result))))


def refusals(graph: Graph) -> list[str | None]:
    return [match.refusal for match in SMALL.matches(graph)]


def test_launches_share_the_cost() -> None:
    after = SMALL.run(updated())
    lowered = lower(after)
    found = costs(after, lowered)
    assert [c.operators.split()[0] for c in found] == ["matmul", "mul*2"] * 3
    assert sum(c.bytes for c in found) == traffic(after).bytes
    assert sum(c.flops for c in found) == traffic(after).flops


def calls(graph: Graph) -> int:
    return sum(isinstance(launch, CallLaunch) for launch in check(graph).program.launches)


@pytest.mark.compiled
def test_numbers_memory_and_bytes() -> None:
    graph = updated()
    after = SMALL.run(graph)
    verify(after)
    check_same(graph, after)
    assert refusals(graph) == [None]
    assert calls(after) == 3, "eight rows are two parts of three and one of two"
    check_model(after)
    assert memory(graph).peak - memory(after).peak == 5 * 5 * 4
    promised = [match.traffic for match in SMALL.matches(graph)]
    assert promised == [traffic(after).bytes - traffic(graph).bytes] == [-2 * 8 * 5 * 4]


@pytest.mark.compiled
def test_rows_of_embeddings_are_added_to_their_part() -> None:
    signature = f"{SIGNATURE}, i: i64[2, 3], g: f32[2, 3, 5]"
    body = UPDATE.replace("%k =", "%e = add_rows(%d, %i, %g)\n%k =").replace("add(%s, %d)", "add(%s, %e)")
    graph = updated(signature, body)
    after = SMALL.run(graph)
    check_same(graph, after)
    assert refusals(graph) == [None]
    assert calls(after) == 3
    check_model(after)


@pytest.mark.compiled
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("dims", ["0, 1", "1, 0"])
def test_gradients_of_tables(padding: int, dims: str) -> None:
    """Zeros and rows; indices and rows that do not lie densely are copied."""
    signature = "p: f32[8, 5], m: f32[8, 5], r: f32[5], i: i64[3, 3], g: f32[3, 3, 5]"
    result = f"embedding_grad(%v, %j, rows=8, padding_idx={padding})"
    moved = f"%j = permute(%i, dims=({dims}))\n%v = permute(%g, dims=({dims}, 2))\n"
    body = UPDATE.replace("%d = matmul(%a, %b)", f"{moved}%d = {result}")
    graph = updated(signature, body)
    after = SMALL.run(graph)
    check_same(graph, after)
    assert refusals(graph) == [None]
    check(after)
    assert memory(after).peak <= memory(graph).peak - 5 * 5 * 4
    if dims == "0, 1":  # the model does not count what is copied because a kernel wants it densely
        check_model(after)


@pytest.mark.compiled
def test_through_views() -> None:
    body = UPDATE.replace("%k =", "%v = view(%d, shape=(8, 5, 1))\n%w = permute(%v, dims=(0, 2, 1))\n%k =")
    signature = SIGNATURE.replace("p: f32[8, 5], m: f32[8, 5]", "p: f32[8, 1, 5], m: f32[8, 1, 5]")
    graph = updated(signature, body.replace("add(%s, %d)", "add(%s, %w)"))
    assert refusals(graph) == [None]
    assert calls(SMALL.run(graph)) == 3


def test_refused() -> None:
    assert refusals(updated(result="%d")) == ["%d has other readers than its update"]
    twice = UPDATE.replace("write p", "%z = sin(%d)\nwrite p")
    assert refusals(updated(body=twice, result="%z")) == ["%d has other readers than its update"]
    summed = UPDATE.replace("add(%s, %d)", "add(%s, %t)").replace(
        "%k =", '%t = reduce(%d, kind="sum", dims=(0,), keepdim=True)\n%k ='
    )
    assert refusals(updated(body=summed)) == ["%d is read by reduce.sum, which is not an update"]
    turned = UPDATE.replace("%k =", "%t = permute(%d, dims=(1, 0))\n%k =").replace("%d)\n%h", "%t)\n%h")
    square = "p: f32[8, 8], m: f32[8, 8], r: f32[8], a: f32[8, 4], b: f32[4, 8]"
    assert refusals(updated(square, turned)) == ["%d is read by permute, which is not an update"]
    unwritten = UPDATE.replace("write m <- %n\n", "")
    assert refusals(updated(body=unwritten, result="%n")) == ["%n does not replace an argument of the update in place"]


def test_an_operand_that_the_update_overwrites() -> None:
    """The second part's matmul would read what the first part's update has left."""
    square = "p: f32[8, 8], m: f32[8, 8], r: f32[8], a: f32[8, 8]"
    graph = updated(square, UPDATE.replace("matmul(%a, %b)", "matmul(%a, %p)"))
    assert refusals(graph) == ["%p is overwritten before the last chunk is computed"]
    assert SMALL.run(graph) is graph


def test_small_products_and_symbolic_sizes_stay_whole() -> None:
    assert ChunkUpdates().matches(updated()) == []
    symbolic = updated(SIGNATURE.replace("8", "n"))
    assert SMALL.matches(symbolic) == []


def test_a_chain_that_breaks_is_found() -> None:
    after = SMALL.run(updated())
    after.outputs.append(next(n.outputs[0] for n in after.nodes if isinstance(n.op, Matmul)))
    with pytest.raises(Invalid, match="it is computed in chunks, but %d has other readers than its update"):
        verify(after)


def test_a_later_pass_that_breaks_a_chain_makes_it_whole() -> None:
    class Between(Pass):
        """Put a reader of nothing between the two."""

        level = "global_movement"

        def run(self, graph: Graph) -> Graph:
            other = graph.copy()
            at = next(i for i, n in enumerate(other.nodes) if isinstance(n.op, Matmul))
            other.nodes.insert(at, other.nodes.pop(0))
            return other

    graph = updated(SIGNATURE + ", x: f32[3]", "%z = exp(%x)\n" + UPDATE, "%z")
    parts, broken = (
        p.run(graph) for p in (Pipeline(global_movement=(SMALL,)), Pipeline(global_movement=(SMALL, Between())))
    )
    assert sum(chunks_of(n.op) > 1 for n in parts.nodes) == 1
    assert all(chunks_of(n.op) == 1 for n in broken.nodes)
    check_same(graph, broken)


@pytest.mark.compiled
def test_an_update_of_two_parameters_uses_up_one_gradient_in_parts() -> None:
    graph = program(
        SIGNATURE + ", t: f32[8, 5]",
        """
        %d = matmul(%a, %b)
        %e = matmul(%a, %b)
        %q, %s = kernel(x0=%p, x1=%d, x2=%t, x3=%e) {
          %v0 = sub(%x0, %x1)
          %v1 = sub(%x2, %x3)
          %v2 = sub(%v1, %x1)
          yield %v0 over %x0, %v2 over %x2
        }
        write p <- %q
        write t <- %s
        """,
    )
    after = checked(SMALL, graph)
    assert sorted(chunks_of(n.op) for n in after.nodes) == [1, 1, 3]
    check_same(graph, after)
    check(after)


class Tied(nn.Module):
    """Tokens in, tokens out, by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.hidden = nn.Linear(16, 40)
        self.back = nn.Linear(40, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        h = h + self.back(F.gelu(self.hidden(h)))
        return F.linear(h, self.table.weight).flatten(0, 1)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ],
    ids=["AdamW", "momentum"],
)
def test_training(optimizer) -> None:
    """A tied table, whose gradient is a matmul and rows, and weights; Adam's kernels make scalars besides."""
    torch.manual_seed(0)
    theirs = Tied()
    ours = copy.deepcopy(theirs)
    tokens, targets = torch.randint(50, (2, 5)), torch.randint(50, (10,))
    results = [optimizer(m.parameters()) for m in (ours, theirs)]
    parts: list[int] = []

    def watch(step: Step) -> None:
        if isinstance(step.transformation, ChunkUpdates):
            parts.extend(n.op.chunks for n in step.graph.nodes if isinstance(n.op, Matmul) and n.op.chunks > 1)

    pipeline = dt.TRAINING.replace(ChunkUpdates, ChunkUpdates(part=640, min_bytes=0))
    pipeline = pipeline.replace(ReuseOperands, ReuseOperands(min_bytes=0))
    step = dt.training_step(ours, F.cross_entropy, results[0], pipeline=pipeline, pass_callback=watch)
    for _ in range(4):
        loss = step(tokens, targets)
        results[1].zero_grad()
        expected = F.cross_entropy(theirs(tokens), targets)
        expected.backward()
        results[1].step()
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    assert step.breaks == [] and sorted(parts) == [4, 4, 5]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-4, atol=1e-5)


def test_a_product_moves_to_its_update_if_that_frees_more_than_it_holds() -> None:
    between = UPDATE.replace("%k =", "%w = matmul(%x, %z)\n%k =").replace("%r", "%w")
    signature = SIGNATURE + ", x: f32[1, 2], z: f32[2, 5]"
    small = updated(signature.replace("a: f32[8, 4], b: f32[4, 5]", "a: f32[8, 2], b: f32[2, 5]"), between)
    assert refusals(small) == [None]
    at = [isinstance(n.op, Matmul) and n.op.chunks > 1 for n in SMALL.run(small).nodes].index(True)
    assert SMALL.run(small).nodes[at + 1].op.updates
    large = signature.replace("a: f32[8, 4], b: f32[4, 5]", "a: f32[8, 40], b: f32[40, 5]")
    why = "%d would be computed later, and its larger operands would stay live until then"
    assert refusals(updated(large, between)) == [why]
