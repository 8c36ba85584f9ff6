"""Which tensors that a call leaves behind share memory in PyTorch: programs give each memory of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor

from daceml_train.frontends.torch.paths.trie import Result
from daceml_train.frontends.torch.paths.values import memory


def kept_of(results: Mapping[Result, weakref.ref[Tensor]]) -> list[Result]:
    """The results that user code keeps: those that live, but for tensors that a view of them keeps.

    Where user code keeps such a tensor as well, the next call along the path finds out.
    """
    living = {result: tensor for result, found in results.items() if (tensor := found()) is not None}
    bases = {id(tensor._base) for tensor in living.values() if tensor._base is not None}
    return [result for result, tensor in living.items() if id(tensor) not in bases]


def shared(memories: Mapping[Result, int], loss: Result, kept: Iterable[Result], operands: Iterable[Tensor]) -> str:
    """Why a program cannot leave behind the loss and what user code keeps; nothing if it can.

    `memories` is what `memory` says of the tensor of each result. That of the loss is the caller's alone.
    """
    outside = {memory(t) for t in operands}
    if memories.get(loss) in outside:
        return "the loss is a view of a parameter or of another tensor that the model does not compute"
    seen: set[int] = set()
    for result in kept:
        if (own := memories.get(result)) is None:
            continue
        if own in outside:
            return "user code keeps a view of a parameter or of another tensor that the model does not compute"
        if own in seen:
            return "user code keeps two tensors that share memory"
        seen.add(own)
    return ""
