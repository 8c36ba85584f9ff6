"""The table in docs/results/operators.md: what each ATen operator becomes, its derivative, element types and tests.

    python -m benchmarks.conformance.operators

What an operator becomes is recorded while samples of PyTorch's operator database are captured, so the table says what
happens and not what was meant to.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.testing._internal.common_methods_invocations import op_db

from benchmarks.conformance.captured import Prepared, graph_of, prepared
from benchmarks.conformance.samples import LEFT_OUT, samples
from daceml_train.frontends.torch.capture import capture
from daceml_train.frontends.torch.rules import fallback
from daceml_train.frontends.torch.rules.translate import RULES, Translator
from daceml_train.graph.node import Node
from daceml_train.ops.elementwise import Cast, Full
from daceml_train.ops.fallback import Aten, Body
from daceml_train.ops.movement import Expand, View

PAGE = Path(__file__).parents[2] / "docs" / "results" / "operators.md"
TESTS = Path(__file__).parents[2] / "tests" / "ops"
TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
)


@dataclass
class Entry:
    """What was seen of one operator of the dispatcher."""

    emitted: dict[str, None] = field(default_factory=dict)
    calls: dict[str, None] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    types: set[torch.dtype] = field(default_factory=set)
    derivative: dict[str, None] = field(default_factory=dict)
    by_rule: bool = False
    by_call: bool = False


class Recorder:
    """Notes what the rules and the fallback emit while graphs are captured."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = collections.defaultdict(Entry)

    def record(self, t: Translator, node: fx.Node, results: list[Node], by_call: bool) -> None:
        """Note the nodes that `node` has become."""
        entry = self.entries[base_name(str(node.target))]
        examples = node.meta.get("val")
        for example in examples if isinstance(examples, list | tuple) else (examples,):
            if isinstance(example, torch.Tensor):
                entry.types.add(example.dtype)
        entry.by_call |= by_call
        entry.by_rule |= not by_call
        for op in (n.op for n in results):
            if isinstance(op, Aten):
                entry.derivative["PyTorch's" if isinstance(op.backward, Body) else ""] = None
            elif not isinstance(op, Full | Cast | View | Expand) or len(results) == 1:
                (entry.calls if op.vendor else entry.emitted)[op.label] = None
                entry.files[type(op).__module__.rsplit(".", 1)[-1]] = None
                entry.derivative["zero" if op.zero_gradient else "own"] = None

    def install(self) -> None:
        """Put the recorder around every rule and the fallback of this process."""
        for name, rule in list(RULES.items()):

            def noted(t: Translator, *arguments: Any, _rule: Any = rule, **keywords: Any) -> Any:
                before = len(t.graph.nodes)
                result = _rule(t, *arguments, **keywords)
                if result is not None and not any(isinstance(n.op, Aten) for n in t.graph.nodes[before:]):
                    self.record(t, t.node, t.graph.nodes[before:], False)
                return result

            RULES[name] = noted
        emit = fallback.emit

        def called(t: Translator, node: fx.Node, arguments: Any, keywords: Any) -> Any:
            before = len(t.graph.nodes)
            result = emit(t, node, arguments, keywords)
            self.record(t, node, t.graph.nodes[before:], True)
            return result

        fallback.emit = called


def base_name(target: str) -> str:
    """The operator of an overload: `aten.add.Tensor` is `add`."""
    namespace, *rest = target.split(".")
    return rest[0] if namespace == "aten" else f"{namespace}.{rest[0]}"


def observe(recorder: Recorder) -> None:
    """Capture samples of every entry and element type, several as one graph."""
    group: list[Prepared] = []
    for op in op_db:
        for dtype in TYPES:
            if op.name in LEFT_OUT or dtype not in op.dtypes:
                continue
            count = 3 if dtype is torch.float32 else 1
            with contextlib.suppress(Exception):
                for sample in islice(samples(op, dtype, op.supports_autograd and dtype is torch.float32), count):
                    result = prepared(op, 0, sample, False)
                    group += [result] if isinstance(result, Prepared) else []
        if len(group) >= 12:
            _observe(group)
            group = []
    _observe(group)


def _observe(group: Sequence[Prepared]) -> None:
    try:
        capture.capture(graph_of(group), [t for p in group for t in p.tensors])
    except Exception:  # the sweep says which and why
        for half in (group[: len(group) // 2], group[len(group) // 2 :]) if len(group) > 1 else ():
            _observe(half)


def page(entries: dict[str, Entry]) -> str:
    """The page of the documents."""
    return "\n".join([_INTRODUCTION, *_rows(entries), _CALLED, *_called(entries)]) + "\n"


_INTRODUCTION = """# Operators

Generated by `.venv/bin/python -m benchmarks.conformance.operators`; do not edit. What ATen's operators become was noted
while samples of PyTorch's operator database were captured; [conformance.md](conformance.md) says how right they are.

Operators **in kernels** are generated code, and fuse; **library calls** run as PyTorch's kernels. The derivative is
made of operators of this project (*own*), *zero*, or PyTorch's own, traced. Composite operators of PyTorch, which
TorchDynamo or the trace takes apart, are not listed.

| operator | in kernels | library calls | derivative | element types | tests |
|---|---|---|---|---|---|"""
_CALLED = """
## Without a rule

These run as PyTorch's operators, as nodes of the same graph, with PyTorch's derivative where it has one.
"""


def _rows(entries: dict[str, Entry]) -> Iterator[str]:
    for name in rule_names():
        entry = entries.get(name, Entry())
        calls = [f"`{c}`" for c in entry.calls] + ([f"`aten.{name}` (some arguments)"] if entry.by_call else [])
        derivative = "own" if "own" in entry.derivative else ", ".join(d for d in entry.derivative if d)
        tests = [f"`{f}`" for f in entry.files if (TESTS / f"test_{f}.py").exists()]
        cells = [f"`{name}`", _few(f"`{e}`" for e in entry.emitted), ", ".join(calls), derivative]
        yield f"| {' | '.join(cells)} | {_types(entry)} | {', '.join(tests)} |"


def _called(entries: dict[str, Entry]) -> Iterator[str]:
    names = sorted(n for n, e in entries.items() if e.by_call and not e.by_rule and n not in rule_names())
    yield (
        ", ".join(f"`{n}`" + ("" if "PyTorch's" in entries[n].derivative else " (no derivative)") for n in names) + "."
    )


def rule_names() -> list[str]:
    """PyTorch's operators that have a rule; this project's own and those of plugins are not among them."""
    return sorted({base_name(overload) for overload in RULES if overload.startswith(("aten.", "prims."))})


def _few(labels: Iterator[str]) -> str:
    names = list(labels)
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _types(entry: Entry) -> str:
    shown = [str(dtype).removeprefix("torch.") for dtype in TYPES if dtype in entry.types]
    return ", ".join(shown)


def main() -> None:
    """Observe, and write the page."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    recorder = Recorder()
    recorder.install()
    observe(recorder)
    PAGE.write_text(page(dict(recorder.entries)))


if __name__ == "__main__":
    main()
