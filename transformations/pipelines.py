"""The pipelines that come with the package. They are frozen values; every edit returns a new one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from daceml_train.errors import Invalid, nearest
from daceml_train.passes.pipeline import Pipeline
from daceml_train.transformations import catalog
from daceml_train.transformations.distribution.bucket import Bucket
from daceml_train.transformations.distribution.choose_rows import ChooseRows
from daceml_train.transformations.forward.blocked_attention import BlockedAttention
from daceml_train.transformations.forward.cross_entropy import FuseSoftmaxCrossEntropy
from daceml_train.transformations.forward.hoist_matmuls import HoistMatmuls
from daceml_train.transformations.forward.recognize_attention import RecognizeAttention
from daceml_train.transformations.fusion.duplicate import DuplicateCheapProducers
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise, FuseEpilogue, FuseIntoReduction
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.fusion.slice_first import SliceFirst
from daceml_train.transformations.global_movement.chunk_updates import ChunkUpdates
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from daceml_train.transformations.global_movement.concatenate_in_place import ConcatenateInPlace
from daceml_train.transformations.global_movement.concurrency import Concurrency
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.overlap import Overlap
from daceml_train.transformations.global_movement.rematerialize_cheap import RematerializeCheap
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands
from daceml_train.transformations.global_movement.schedule import Schedule
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from daceml_train.transformations.intra_operator.accumulate_matmuls import AccumulateMatmuls
from daceml_train.transformations.intra_operator.accumulate_rows import AccumulateRows
from daceml_train.transformations.intra_operator.assemble_slices import AssembleSlices
from daceml_train.transformations.intra_operator.batch_matmul import MergeBatch, MergeSummedBatch
from daceml_train.transformations.intra_operator.concatenate_matmuls import ConcatenateMatmuls
from daceml_train.transformations.intra_operator.concatenate_transposed import ConcatenateTransposed
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.intra_operator.factor_matmuls import FactorMatmuls
from daceml_train.transformations.intra_operator.fold_batch_norm import FoldBatchNorm
from daceml_train.transformations.intra_operator.fold_constants import FoldConstants
from daceml_train.transformations.intra_operator.mixed_precision import MixedPrecision
from daceml_train.transformations.intra_operator.simplify import Simplify
from daceml_train.transformations.intra_operator.transpose_matmul import TransposeMatmul
from daceml_train.transformations.intra_operator.update_rows import UpdateRows
from daceml_train.transformations.layout.assign import AssignLayouts
from daceml_train.transformations.layout.convolution_as_matmul import ConvolutionAsMatmul
from daceml_train.transformations.layout.fuse_matmul_epilogue import FuseMatmulEpilogue
from daceml_train.transformations.layout.matmul_bias import FuseMatmulBias
from daceml_train.transformations.layout.pack_weights import PackWeights
from daceml_train.transformations.layout.winograd_convolution import WinogradConvolution

catalog.load()  # texts of pipelines may name any pass

FUSION = (
    SliceFirst(),
    FuseElementwise(),
    FuseIntoReduction(),
    FuseEpilogue(),
    DuplicateCheapProducers(),
    FuseSiblings(),
)
"""The passes that fuse leaves into kernels."""

TRAINING = Pipeline(
    forward=(
        CommonSubexpressions(),
        HoistMatmuls(),
        FuseSoftmaxCrossEntropy(),
        RecognizeAttention(),
        BlockedAttention(),
    ),
    distribution=(ChooseRows(), Bucket()),
    intra_operator=(
        UpdateRows(),
        Decompose(),
        FoldConstants(),
        Simplify(),
        CommonSubexpressions(),
        MergeBatch(),
        MergeSummedBatch(),
        TransposeMatmul(),
        AssembleSlices(),
        ConcatenateTransposed(),
        AccumulateRows(),
        AccumulateMatmuls(),
        ConcatenateMatmuls(),
        Simplify(),
        FactorMatmuls(),
        DeadCode(),
    ),
    fusion=FUSION,
    layout=(
        FuseMatmulBias(),
        AssignLayouts(),
        WinogradConvolution(),
        FuseMatmulEpilogue(),
        ConvolutionAsMatmul(),
    ),
    global_movement=(
        DeadCode(),
        RematerializeCheap(),
        UpdateInPlace(),
        Schedule(),
        Overlap(),
        ConcatenateInPlace(),
        ReuseOperands(),
        ChunkUpdates(),
        Concurrency(),
    ),
)
"""A training step: forward, backward and, where they are compiled with it, loss and update."""

MIXED_PRECISION = TRAINING.without(BlockedAttention).after("intra_operator", MixedPrecision())
"""A training step with matmuls and convolutions in bfloat16; parameters and everything else stay in float32.

Attention without masks and dropout is the library's, which runs in bfloat16, too.
"""

INFERENCE = Pipeline(
    forward=(
        CommonSubexpressions(),
        HoistMatmuls(),
        FuseSoftmaxCrossEntropy(),
        RecognizeAttention(),
        BlockedAttention(),
    ),
    intra_operator=(
        FoldBatchNorm(),
        Decompose(),
        FoldConstants(),
        Simplify(),
        CommonSubexpressions(),
        MergeBatch(),
        TransposeMatmul(),
        Simplify(),
        DeadCode(),
    ),
    fusion=FUSION,
    layout=(
        AssignLayouts(prepared=True),
        PackWeights(),
        CommonSubexpressions(),
        FuseMatmulEpilogue(),
        FuseMatmulBias(),
        ConvolutionAsMatmul(),
    ),
    global_movement=(DeadCode(), UpdateInPlace(), Schedule(), ConcatenateInPlace(), ReuseOperands()),
)
"""The forward pass alone."""

NAMED: Mapping[str, Pipeline] = {
    "training": TRAINING,
    "inference": INFERENCE,
    "mixed_precision": MIXED_PRECISION,
    "none": Pipeline(),
}
"""The pipelines that options and the command line name."""


def given_pipeline(given: Pipeline | str | Path) -> Pipeline:
    """A pipeline that an option names, or that `Pipeline.of` reads. Raises `Invalid` for another word."""
    if isinstance(given, str) and given.isidentifier():
        if given not in NAMED:
            raise Invalid(
                f"no pipeline is called {given!r}{nearest(given, NAMED)}", advice=f"known: {', '.join(NAMED)}"
            )
        return NAMED[given]
    return Pipeline.of(given)
