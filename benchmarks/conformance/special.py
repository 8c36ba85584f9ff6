"""Special values: operands and attributes that are NaN, infinite, zero of either sign, subnormal, or at a type's ends.

The operators are those of PyTorch's database; what their samples hold is replaced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, SampleInput, UnaryUfuncInfo
from torch.utils import _pytree as pytree

from benchmarks.conformance.samples import entries as database
from benchmarks.conformance.samples import label, samples

_OTHER = """
linalg. fft. sparse. masked. jiterator_ signal. torch.ops. svd cholesky lu qr inverse nn.functional.scaled_dot
nn.functional.multi_head pca_ ormqr geqrf triangular_solve logdet pinverse nn.functional.conv
nn.functional.grid_sample nn.functional.interpolate nn.functional.upsample nn.functional.ctc_loss
nn.functional.linear_cross stft istft cdist matrix_exp polar chalf nn.functional.embedding to_sparse corrcoef cov
einsum tensordot hash_tensor normal empty new_empty bernoulli uniform multinomial rand cauchy exponential geometric
log_normal nn.functional.dropout nn.functional.feature_alpha nn.functional.alpha_dropout nn.functional.rrelu
nn.functional.fractional histogram bincount segment_reduce nn.functional.pdist cfloat cdouble nn.functional.bilinear
as_strided resize view_as_complex complex addmm addmv addbmm baddbmm bmm mm mv dot vdot matmul __rmatmul__ inner
nn.functional.linear addr nn.functional.rnn _unsafe_masked_index put index_put
"""
_FAMILIES = (*_OTHER.split(), "grid_sampler")
"""Matrices, spectra, complex numbers, random numbers, and what takes numbers as indices."""

ATTRIBUTES: dict[str, Sequence[tuple[str, ...]]] = {
    "clamp": (("min", "max"), ("min",), ("max",)),
    "clamp_min": (("min",),),
    "clamp_max": (("max",),),
    "nn.functional.hardtanh": (("min_val", "max_val"),),
    "nn.functional.threshold": (("threshold", "value"),),
    "nn.functional.leaky_relu": (("negative_slope",),),
    "nn.functional.elu": (("alpha",),),
    "nn.functional.celu": (("alpha",),),
    "nn.functional.softplus": (("beta", "threshold"),),
    "nn.functional.softshrink": (("lambd",),),
    "nn.functional.hardshrink": (("lambd",),),
    "nn.functional.layer_norm": (("eps",),),
    "nn.functional.group_norm": (("eps",),),
    "nn.functional.rms_norm": (("eps",),),
    "nn.functional.batch_norm": (("eps",), ("momentum",)),
    "nn.functional.instance_norm": (("eps",),),
    "nn.functional.normalize": (("eps",), ("p",)),
    "nn.functional.huber_loss": (("delta",),),
    "nn.functional.smooth_l1_loss": (("beta",),),
    "nn.functional.pad": (("value",),),
    "nan_to_num": (("nan", "posinf", "neginf"),),
    "logit": (("eps",),),
    "masked_fill": (("value",),),
}
"""Entry -> groups of attributes that take numbers, set to special ones; those that samples set are set as well."""
_ACTIVATIONS = """
hardtanh relu relu6 hardsigmoid hardswish elu celu selu threshold leaky_relu softplus silu mish gelu softshrink
hardshrink softsign logsigmoid tanhshrink prelu
"""
_BY_ELEMENT = {f"nn.functional.{name}" for name in _ACTIVATIONS.split()} | {
    "clamp", "clamp_min", "clamp_max", "where", "lerp", "addcmul", "addcdiv", "masked_fill",
}  # fmt: skip
_PICKING = """
amax amin max min aminmax sort argsort topk kthvalue median nanmedian mode cummax cummin argmax argmin unique msort
gather take index_select flip roll cat stack where nn.functional.max_pool1d nn.functional.max_pool2d
nn.functional.max_pool3d nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
"""
_CHOOSING = frozenset(_PICKING.split())
"""Entries that choose elements and compute nothing with them."""
_SET_TO = (math.nan, math.inf, -math.inf, 0.0, 0.5)


_PERIODIC = frozenset({"sin", "cos", "tan", "sinc"})
"""Entries whose kernels on float32 reduce arguments beyond 2^30 without the digits of pi that these need."""
_RECURRENT = "_polynomial_"
"""Part of the names of entries that compute by recurrence, in PyTorch as many steps as an operand says: up to 2^31."""


def entries(dtype: torch.dtype) -> list[Any]:
    """The entries that are swept."""
    return [op for op in database(dtype, dtype.is_floating_point) if not op.name.startswith(_FAMILIES)]


def by_element(op: Any) -> bool:
    """Whether each element of the result depends on one element of each operand, however these are repeated."""
    return isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo) or op.name in _BY_ELEMENT


def specials(dtype: torch.dtype, extreme: bool = True) -> Tensor:
    """The special values of an element type, and a few plain ones at which functions have a kink.

    Without the `extreme` ones, of which a sum depends on the order in which it is added up.
    """
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        values = [ends.min, ends.min + 1, 0, 1, 2, 3, 7, ends.max - 1, ends.max]
        return torch.tensor(values if ends.min == 0 else [*values, -1, -2, -7], dtype=dtype)
    f = torch.finfo(dtype)
    if not extreme:
        plain = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 7.5, 20.0, math.inf]
        return torch.tensor([*plain, *(-p for p in plain), math.nan], dtype=dtype)
    positive = [0.0, f.smallest_normal / 2, f.smallest_normal, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 7.5, 20.0, 90.0]
    positive += [720.0, f.max**0.5 * 2, f.max, math.inf, 2.0**-149 if dtype is torch.float32 else f.tiny / 4]
    return torch.tensor([*positive, *(-p for p in positive), math.nan], dtype=dtype)


def _pool(op: Any, dtype: torch.dtype, extreme: bool = True) -> Tensor:
    """The special values at which an entry of PyTorch's is defined, and ends in time."""
    pool = specials(dtype, extreme)
    if label(op) in _PERIODIC:
        return pool[~((pool.double().abs() > 2**30) & pool.isfinite())]
    if _RECURRENT in label(op) and not dtype.is_floating_point:
        return pool[pool.double().abs() < 1000]
    return pool


def special_samples(op: Any, dtype: torch.dtype, gradients: bool, count: int = 3) -> Iterator[SampleInput]:
    """Samples of an entry, with special values in operands, and then in attributes."""
    small = (s for s in samples(op, dtype, gradients) if sum(t.numel() for t in _tensors(s)) <= 4000)
    plain = list(itertools.islice(small, 12))
    if isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo) and plain:
        yield from _products(op, plain[0], dtype)
    picked = plain[:: max(1, len(plain) // count)][:count]
    for number, sample in enumerate(picked):
        for share in (0.12, 0.6):
            yield _filled(op, sample, dtype, share, number)
    seen: set[Any] = set()
    for sample in plain:
        numbers = [k for k, v in sample.kwargs.items() if isinstance(v, float)]
        positions = [i for i, v in enumerate(sample.args) if isinstance(v, float)]
        if (tuple(numbers), tuple(positions)) not in seen:
            seen.add((tuple(numbers), tuple(positions)))
            for key, value in itertools.product(numbers, _SET_TO):
                yield replaced(_filled(op, sample, dtype, 0.3, 1), kwargs={**sample.kwargs, key: value})
            for place, value in itertools.product(positions, _SET_TO):
                yield replaced(
                    _filled(op, sample, dtype, 0.3, 1),
                    args=tuple(value if i == place else a for i, a in enumerate(sample.args)),
                )
    for names in ATTRIBUTES.get(label(op), ()) if plain and dtype.is_floating_point else ():
        base = _filled(op, plain[0], dtype, 0.5, 2)
        for values in itertools.product(_SET_TO, repeat=len(names)):
            result = dict(zip(names, values, strict=True))
            yield SampleInput(base.input, args=_own(op, base.args), kwargs={**_plain(base.kwargs, names), **result})


def replaced(sample: SampleInput, **changes: Any) -> SampleInput:
    """A sample with other arguments; tensors stay those of `sample`."""
    given = {"args": sample.args, "kwargs": sample.kwargs} | changes
    return SampleInput(sample.input, args=given["args"], kwargs=given["kwargs"])


def _own(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments that no attribute replaces."""
    return () if op.name in ("clamp", "clamp_min", "clamp_max", "masked_fill.value", "nan_to_num", "logit") else args


def _plain(kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in names and k not in ("min", "max")}


def one_shape(sample: SampleInput) -> bool:
    """Whether no operand is broadcast, so that no gradient is a sum."""
    return len({t.shape for t in _tensors(sample) if t.is_floating_point()}) <= 1


def _tensors(sample: SampleInput) -> list[Tensor]:
    return [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]


def _filled(op: Any, sample: SampleInput, dtype: torch.dtype, share: float, seed: int) -> SampleInput:
    """The sample with a share of the elements of its tensors of `dtype` replaced by special values."""
    generator = torch.Generator().manual_seed(seed)
    pool = _pool(op, dtype, (by_element(op) and one_shape(sample)) or op.name in _CHOOSING)

    def fill(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype is not dtype or value.layout is not torch.strided:
            return value
        drawn = pool[torch.randint(len(pool), value.shape, generator=generator)]
        chosen = torch.rand(value.shape, generator=generator) < share
        return torch.where(chosen, drawn, value.detach()).requires_grad_(value.requires_grad)

    result: SampleInput = sample.transform(fill)
    return result


def _products(op: Any, sample: SampleInput, dtype: torch.dtype) -> Iterator[SampleInput]:
    """All special values, or all pairs of them; also with a number in place of the second operand."""
    pool = _pool(op, dtype)
    wants = isinstance(sample.input, Tensor) and sample.input.requires_grad
    if isinstance(op, UnaryUfuncInfo):
        yield SampleInput(pool.repeat(3)[:-1].clone().requires_grad_(wants), args=sample.args, kwargs=sample.kwargs)
        return
    a, b = (m.reshape(-1).contiguous() for m in torch.meshgrid(pool, pool, indexing="ij"))
    if _undefined(op, dtype):
        kept = (b != 0) & (b != -1)
        a, b = a[kept], b[kept]
    second = [x for x in sample.args if isinstance(x, Tensor)]
    if len(second) == 1 and second[0].dtype is dtype:
        yield SampleInput(
            a.clone().requires_grad_(wants), args=(b.clone().requires_grad_(second[0].requires_grad),),
            kwargs=sample.kwargs,
        )  # fmt: skip


_DIVIDING = "div floor_divide remainder fmod true_divide __rdiv__ __rmod__ gcd lcm"


def _undefined(op: Any, dtype: torch.dtype) -> bool:
    """Whether division by 0 raises, and that of the least number by -1 ends the process."""
    divides = op.name in _DIVIDING.split()
    return divides and not dtype.is_floating_point


def without(op: Any, sample: SampleInput, dtype: torch.dtype) -> bool:
    """Whether a sample of integers divides by what it must not."""
    return _undefined(op, dtype) and any(bool(((t == 0) | (t == -1)).any()) for t in _tensors(sample))
