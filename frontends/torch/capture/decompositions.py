"""The ATen operators that a trace decomposes: PyTorch's core table without those that this project keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions

from daceml_train.frontends.torch.capture import foreach

_KEPT = """
detach graft overwrite attention custom_vjp control loss_gradients final_gradients fill zero
convolution native_layer_norm native_group_norm _native_batch_norm_legit _native_batch_norm_legit_functional
embedding _embedding_bag _softmax _safe_softmax _log_softmax logsumexp native_dropout linalg_vector_norm
gelu silu mish leaky_relu elu celu _prelu_kernel xlogy special_xlog1py special_entr logit
softplus log_sigmoid_forward hardtanh hardsigmoid hardswish threshold tanh sigmoid
addcmul addcdiv _softmax_backward_data smooth_l1_loss huber_loss
nll_loss_forward nll_loss2d_forward mse_loss binary_cross_entropy _ctc_loss
max_pool2d_with_indices avg_pool2d split split_with_sizes unbind stack
std var std_mean var_mean sinc special_log_ndtr logaddexp logaddexp2
im2col col2im index_add index_copy index_fill renorm cdist pdist take bernoulli
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
roll baddbmm addr max_unpool2d max_unpool3d multi_margin_loss multilabel_margin_loss_forward
"""
KEPT = frozenset(_KEPT.split())
"""Not decomposed: there is an operator for it, its parts would lose a gradient at a kink, or ATen has a kernel."""


@functools.cache
def table_with_random_operators() -> dict[Any, Callable[..., Any]]:
    """The table without decompositions of random operators."""
    tagged = torch.Tag.nondeterministic_seeded
    return {target: rule for target, rule in table().items() if tagged not in target.tags}


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Operator overload -> its decomposition, for `aot_export_module` and `make_fx`."""
    rules = {target: rule for target, rule in core_aten_decompositions().items() if _name(target) not in KEPT}
    # PyTorch's variants without gradients, which a trace without autograd would contain, have no derivative.
    return (
        rules
        | foreach.decompositions()
        | {
            torch.ops.aten._embedding_bag_forward_only.default: torch.ops.aten._embedding_bag.default,
            torch.ops.aten._trilinear.default: _trilinear,
        }
    )


def _trilinear(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """`bilinear` as matmuls: each factor lacks the dimensions `expand`, the product is summed over `sumdim`."""
    letters = "abcdefghijklmnop"[: i1.ndim + len(expand1)]
    factors = ["".join(c for d, c in enumerate(letters) if d not in e) for e in (expand1, expand2, expand3)]
    result = "".join(c for d, c in enumerate(letters) if d not in sumdim)
    return torch.einsum(f"{','.join(factors)}->{result}", i1, i2, i3)


@functools.cache
def derivative_table() -> dict[Any, Callable[..., Any]]:
    """The table for derivatives of single operators: PyTorch's derivative formulas may use what it keeps."""
    kept = {"_embedding_bag_dense_backward", "embedding_dense_backward", "convolution_backward", "col2im", "im2col"}
    return {target: rule for target, rule in table().items() if _name(target) not in kept}


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[1]
