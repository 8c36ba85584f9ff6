"""The pipelines that come with the package: frozen values; every edit of one gives a new one."""

from __future__ import annotations

from daceml_train.passes.pipeline import Pipeline
from daceml_train.transformations import catalog
from daceml_train.transformations.fusion.duplicate import DuplicateCheapProducers
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise, FuseEpilogue, FuseIntoReduction
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.fusion.slice_first import SliceFirst
from daceml_train.transformations.global_movement.concatenate_in_place import ConcatenateInPlace
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.merge_equal import MergeEqual
from daceml_train.transformations.global_movement.recompute_cheap import RecomputeCheap
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands
from daceml_train.transformations.global_movement.schedule import Schedule
from daceml_train.transformations.global_movement.update_in_parts import UpdateInParts
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from daceml_train.transformations.intra_operator.accumulate_products import AccumulateProducts
from daceml_train.transformations.intra_operator.accumulate_rows import AccumulateRows
from daceml_train.transformations.intra_operator.assemble_slices import AssembleSlices
from daceml_train.transformations.intra_operator.attend_in_strips import AttendInStrips
from daceml_train.transformations.intra_operator.batch_matmul import MergeBatch, MergeSummedBatch
from daceml_train.transformations.intra_operator.concatenate_products import ConcatenateProducts
from daceml_train.transformations.intra_operator.cross_entropy import FuseSoftmaxCrossEntropy
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.intra_operator.factor_products import FactorProducts
from daceml_train.transformations.intra_operator.fold_batch_norm import FoldBatchNorm
from daceml_train.transformations.intra_operator.fold_constants import FoldConstants
from daceml_train.transformations.intra_operator.hoist_products import HoistProducts
from daceml_train.transformations.intra_operator.matmul_bias import FuseMatmulBias
from daceml_train.transformations.intra_operator.mixed_precision import MixedPrecision
from daceml_train.transformations.intra_operator.recognise_attention import RecogniseAttention
from daceml_train.transformations.intra_operator.simplify import Simplify
from daceml_train.transformations.intra_operator.transpose_product import TransposeProduct
from daceml_train.transformations.intra_operator.update_rows import UpdateRows
from daceml_train.transformations.layout.assign import AssignLayouts
from daceml_train.transformations.layout.convolve_by_product import ConvolveByProduct
from daceml_train.transformations.layout.fuse_into_product import FuseIntoProduct
from daceml_train.transformations.layout.pack_products import PackProducts

catalog.load()  # texts of pipelines may name any pass

FUSION = (
    SliceFirst(),
    FuseElementwise(),
    FuseIntoReduction(),
    FuseEpilogue(),
    DuplicateCheapProducers(),
    FuseSiblings(),
)
"""Joining leaves to kernels."""

TRAINING = Pipeline(
    forward=(MergeEqual(), HoistProducts(), FuseSoftmaxCrossEntropy(), RecogniseAttention(), AttendInStrips()),
    intra_operator=(
        UpdateRows(),
        Decompose(),
        FoldConstants(),
        Simplify(),
        MergeEqual(),
        MergeBatch(),
        MergeSummedBatch(),
        TransposeProduct(),
        AssembleSlices(),
        AccumulateRows(),
        AccumulateProducts(),
        ConcatenateProducts(),
        Simplify(),
        FactorProducts(),
        DeadCode(),
    ),
    fusion=FUSION,
    layout=(FuseMatmulBias(), AssignLayouts(), ConvolveByProduct()),
    global_movement=(
        DeadCode(),
        RecomputeCheap(),
        UpdateInPlace(),
        Schedule(),
        ConcatenateInPlace(),
        ReuseOperands(),
        UpdateInParts(),
    ),
)
"""A training step: forward, backward and, where it is compiled with them, loss and update."""

MIXED_PRECISION = TRAINING.without(AttendInStrips).after("intra_operator", MixedPrecision())
"""A training step with products and convolutions in bfloat16; parameters and everything else stay in float32.

Attention without masks and dropout is the library's, which works in bfloat16, too.
"""

INFERENCE = Pipeline(
    forward=(MergeEqual(), HoistProducts(), FuseSoftmaxCrossEntropy(), RecogniseAttention(), AttendInStrips()),
    intra_operator=(
        FoldBatchNorm(),
        Decompose(),
        FoldConstants(),
        Simplify(),
        MergeEqual(),
        MergeBatch(),
        TransposeProduct(),
        Simplify(),
        DeadCode(),
    ),
    fusion=FUSION,
    layout=(
        AssignLayouts(prepared=True),
        PackProducts(),
        MergeEqual(),
        FuseIntoProduct(),
        FuseMatmulBias(),
        ConvolveByProduct(),
    ),
    global_movement=(DeadCode(), UpdateInPlace(), Schedule(), ConcatenateInPlace(), ReuseOperands()),
)
"""The forward pass alone."""
