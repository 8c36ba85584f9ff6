"""Classical models on arrays (`ai.onnx.ml`)."""

from __future__ import annotations

import torch
from torch import Tensor

from daceml_train.errors import Unsupported
from daceml_train.frontends.onnx.rules import rule

ML = "ai.onnx.ml"


@rule("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(x: Tensor, columns: Tensor) -> Tensor:
    return (x.unsqueeze(0) if x.dim() == 1 else x).index_select(-1, columns.reshape(-1).long())


@rule("Binarizer", domain=ML)
def binarizer(x: Tensor, *, threshold: float = 0.0) -> Tensor:
    return (x > threshold).to(x.dtype)


@rule("Scaler", domain=ML)
def scaler(x: Tensor, *, offset: tuple[float, ...] = (0.0,), scale: tuple[float, ...] = (1.0,)) -> Tensor:
    return (x.float() - torch.tensor(offset)) * torch.tensor(scale)


@rule("Normalizer", domain=ML)
def normalizer(x: Tensor, *, norm: str = "MAX") -> Tensor:
    size = {
        "MAX": x.amax(-1, keepdim=True),
        "L1": x.abs().sum(-1, keepdim=True),
        "L2": (x * x).sum(-1, keepdim=True).sqrt(),
    }
    whole = size[norm]
    return (x / torch.where(whole == 0, 1, whole)).float()


@rule("LinearRegressor", domain=ML)
def linear_regressor(
    x: Tensor,
    *,
    coefficients: tuple[float, ...],
    intercepts: tuple[float, ...] = (),
    targets: int = 1,
    post_transform: str = "NONE",
) -> Tensor:
    y = x.float() @ torch.tensor(coefficients).reshape(targets, -1).t()
    return _transformed(y + torch.tensor(intercepts) if intercepts else y, post_transform)


@rule("LabelEncoder", domain=ML, since=2)
def label_encoder(
    x: Tensor,
    *,
    keys_floats: tuple[float, ...] = (),
    keys_int64s: tuple[int, ...] = (),
    keys_tensor: Tensor | None = None,
    values_floats: tuple[float, ...] = (),
    values_int64s: tuple[int, ...] = (),
    values_tensor: Tensor | None = None,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_tensor: Tensor | None = None,
) -> Tensor:
    keys = keys_tensor if keys_tensor is not None else torch.tensor(keys_floats or keys_int64s)
    if values_tensor is not None:
        values, default = values_tensor, default_tensor
    elif values_floats:
        values, default = torch.tensor(values_floats), torch.tensor([default_float])
    else:
        values, default = torch.tensor(values_int64s), torch.tensor([default_int64])
    same = x.unsqueeze(-1) == keys
    if keys.is_floating_point():
        same = same | (x.unsqueeze(-1).isnan() & keys.isnan())
    found = values[same.to(torch.int64).argmax(-1)]
    return torch.where(same.any(-1), found, torch.zeros_like(values[0]) if default is None else default.reshape(()))


_AGGREGATE = {0: "mean", 1: "sum", 2: "min", 3: "max", "AVERAGE": "mean", "SUM": "sum", "MIN": "min", "MAX": "max"}
_TRANSFORM = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def _transformed(y: Tensor, post: int | str) -> Tensor:
    name = _TRANSFORM[post] if isinstance(post, int) else post
    if name == "NONE":
        return y
    if name == "SOFTMAX":
        return torch.softmax(y, -1)
    if name == "LOGISTIC":
        return torch.sigmoid(y)
    if name == "SOFTMAX_ZERO":
        return torch.where(y == 0, torch.zeros_like(y), torch.softmax(y.masked_fill(y == 0, -torch.inf), -1))
    raise Unsupported(f"the transformation {name} of a tree ensemble's result is not supported")


@rule("TreeEnsemble", domain=ML, since=5)
def tree_ensemble(
    x: Tensor,
    *,
    aggregate_function: int = 1,
    leaf_targetids: tuple[int, ...],
    leaf_weights: Tensor,
    membership_values: Tensor | None = None,
    n_targets: int = 1,
    nodes_falseleafs: tuple[int, ...],
    nodes_falsenodeids: tuple[int, ...],
    nodes_featureids: tuple[int, ...],
    nodes_hitrates: Tensor | None = None,
    nodes_missing_value_tracks_true: tuple[int, ...] = (),
    nodes_modes: Tensor,
    nodes_splits: Tensor,
    nodes_trueleafs: tuple[int, ...],
    nodes_truenodeids: tuple[int, ...],
    post_transform: int = 0,
    tree_roots: tuple[int, ...],
) -> Tensor:
    """All rows traverse all trees at once: as many steps as the deepest tree has levels."""
    count = len(nodes_featureids)
    # Nodes first, then leaves; a leaf leads to itself.
    leaves = torch.arange(len(leaf_targetids)) + count
    on_true = torch.tensor([n + count * leaf for n, leaf in zip(nodes_truenodeids, nodes_trueleafs, strict=True)])
    on_false = torch.tensor([n + count * leaf for n, leaf in zip(nodes_falsenodeids, nodes_falseleafs, strict=True)])
    on_true, on_false = torch.cat([on_true, leaves]), torch.cat([on_false, leaves])
    feature = torch.cat([torch.tensor(nodes_featureids), torch.zeros_like(leaves)])
    truth = _truths(x, feature[:count], nodes_splits, nodes_modes, membership_values)
    if nodes_missing_value_tracks_true:
        missing = x.index_select(1, feature[:count]).isnan() & torch.tensor(nodes_missing_value_tracks_true).bool()
        truth = truth | missing
    truth = torch.cat([truth, torch.zeros(x.shape[0], len(leaf_targetids), dtype=torch.bool)], 1)
    at = torch.tensor(tree_roots).expand(x.shape[0], -1)
    for _ in range(_depth(on_true.tolist(), on_false.tolist(), tree_roots, count)):
        at = torch.where(truth.gather(1, at), on_true[at], on_false[at])
    leaf = at - count
    weight, target = leaf_weights[leaf], torch.tensor(leaf_targetids)[leaf]
    start = torch.zeros(x.shape[0], n_targets, dtype=x.dtype)
    how = _AGGREGATE[aggregate_function]
    if how == "sum" or how == "mean":
        y = start.scatter_add(1, target, weight.to(x.dtype))
        y = y / len(tree_roots) if how == "mean" else y
    else:
        y = start.scatter_reduce(1, target, weight.to(x.dtype), f"a{how}", include_self=False)
    return _transformed(y, post_transform)


def _truths(x: Tensor, feature: Tensor, splits: Tensor, modes: Tensor, members: Tensor | None) -> Tensor:
    """The outcome of every node's test for every row: [rows, nodes]."""
    value = x.index_select(1, feature)
    tests = [value <= splits, value < splits, value >= splits, value > splits, value == splits, value != splits]
    result = torch.zeros_like(tests[0])
    for mode, test in enumerate(tests):
        result = torch.where(modes.long() == mode, test, result)
    if members is not None:
        sets: list[list[float]] = [[]]
        for member in members.tolist():
            if member != member:  # NaN ends a node's set
                sets.append([])
            else:
                sets[-1].append(member)
        nodes = (modes.long() == 6).nonzero().reshape(-1).tolist()
        for node, chosen in zip(nodes, sets, strict=False):
            column = torch.isin(value[:, node], torch.tensor(chosen, dtype=value.dtype))
            result = torch.where(torch.arange(result.shape[1]) == node, column[:, None], result)
    return result


def _depth(on_true: list[int], on_false: list[int], roots: tuple[int, ...], count: int) -> int:
    depth, level = 0, [root for root in roots if root < count]
    while level:
        depth += 1
        level = [child for node in level for child in (on_true[node], on_false[node]) if child < count]
        if depth > count:
            raise Unsupported("the nodes of a tree ensemble form a cycle")
    return depth
