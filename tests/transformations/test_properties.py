"""Random training graphs through random passes: the values and gradients stay, and no pass adds bytes."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass, Rewrite, checked
from daceml_train.transformations.forward.cross_entropy import FuseSoftmaxCrossEntropy
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.intra_operator.accumulate_matmuls import AccumulateMatmuls
from daceml_train.transformations.intra_operator.assemble_slices import AssembleSlices
from daceml_train.transformations.intra_operator.batch_matmul import MergeBatch, MergeSummedBatch
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.intra_operator.fold_constants import FoldConstants
from daceml_train.transformations.intra_operator.simplify import Simplify
from daceml_train.transformations.layout.matmul_bias import FuseMatmulBias
from tests.transformations.checking import check_same
from tests.transformations.random_graphs import training_graphs

FORWARD = (FuseSoftmaxCrossEntropy(), CommonSubexpressions(), Simplify(), FoldConstants(), MergeBatch())
PASSES: tuple[Pass, ...] = (
    Decompose(),
    Simplify(),
    FoldConstants(),
    CommonSubexpressions(),
    DeadCode(),
    MergeBatch(),
    MergeSummedBatch(),
    AssembleSlices(),
    AccumulateMatmuls(),
    FuseMatmulBias(),
)
SIZES = {"s0": 2}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs(FORWARD), passes=st.lists(st.sampled_from(PASSES), min_size=1, max_size=8))
def test_values_gradients_and_bytes(graph: Graph, passes: list[Pass]) -> None:
    result = graph
    for transformation in passes:
        before = result
        result = checked(transformation, before)
        gained = traffic(result, SIZES).bytes - traffic(before, SIZES).bytes
        assert gained <= 0, f"{transformation} adds {gained} bytes to\n{before}\ngiving\n{result}"
        if isinstance(transformation, Rewrite):
            left = [m for m in transformation.matches(result) if m.refusal is None]
            assert not left, f"{transformation} is not done with\n{result}"
    check_same(graph, result, exact=False, **SIZES)
