"""What user code gets of a recursion in the end: tensors in place of lazy values."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.recursion.forest import gathered
from daceml_train.frontends.torch.recursion.lazy import Lazy, known, outside
from daceml_train.frontends.torch.recursion.recorder import Recorder
from daceml_train.frontends.torch.recursion.runs import Run


def computed(recorder: Recorder, found: Any) -> Any:
    """A result of user code with tensors in place of lazy ones."""
    leaves, spec = pytree.tree_flatten(found)
    lazies = [leaf for leaf in leaves if type(leaf) is Lazy]
    for value in lazies:
        if type(value.source) is Run:
            value.source.use(value.index)
    recorder.flush()
    if not recorder.eager and recorder.exposed.written():
        raise Unsupported(
            "NumPy's writes to a parameter or a buffer within a recursion, whose calls are computed later",
            advice="call the model again: PyTorch runs it from now on",
        )
    with outside(recorder.grad or any(value.meta.requires_grad for value in lazies)):
        gathered(None, [lazies])
        leaves = [known(leaf) if type(leaf) is Lazy else leaf for leaf in leaves]
    recorder.traced.clear()  # which keeps frames, with what their calls refer to
    return pytree.tree_unflatten(leaves, spec)
