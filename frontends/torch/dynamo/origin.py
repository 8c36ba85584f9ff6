"""The origin of a traced operator: the user's module path and source line, from Dynamo's metadata of a node."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import fx

from daceml_train import errors
from daceml_train.ops.operator import Origin

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = (Path(errors.__file__).parent, Path(__file__).parents[1])
_NOT_THE_USERS = (*map(str, _OURS), str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))


def origin(node: fx.Node) -> Origin:
    """Module path (`encoder.layer.3`) and source line (`model.py:12`) of a node, empty where unknown."""
    return Origin(_module(node), _line(node))


def path(source: str) -> str:
    """The user's name in a Dynamo source: `L['self']._modules['fc']._parameters['weight']` is `fc.weight`."""
    text = re.sub(r"\._(modules|parameters|buffers)\['([^']*)'\]", r".\2", source)
    text = re.sub(r"\['([^']*)'\]|\[(\d+)\]", r".\1\2", text)
    parts = [part for part in re.split(r"[.()]+", text) if part and part not in ("L", "G", "getattr", "__self__")]
    return ".".join(parts[1:]) if len(parts) > 1 and source.startswith(("L[", "G[")) else ".".join(parts)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    return path(entries[-1][0]) if entries else ""


def _line(node: fx.Node) -> str:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
