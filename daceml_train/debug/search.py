"""bisect: the first operator or pass that deviates from eager execution in float64, and a script that shows it.

The stages are those of compilation: capture (each captured graph against PyTorch), derivatives (against PyTorch's, then
operator by operator against finite differences), every pass of every level, the partition into forward and backward,
and the generated code (against the graph's own meaning, kernel by kernel). The search ends at the first deviation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.partition import partition
from daceml_train.autodiff.reverse import differentiate
from daceml_train.debug.case import Case, array, cases, departs, eager, first_departing_node
from daceml_train.debug.reproduction import excerpt, smallest, write
from daceml_train.driver.checking import check_flag, check_module
from daceml_train.driver.function import run_with_layout
from daceml_train.driver.goals import compile_differentiable
from daceml_train.driver.settings import Settings
from daceml_train.errors import PassFailed
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Array
from daceml_train.ops.random import Uniform
from daceml_train.passes.base import Pass, checked, without_dead_code
from daceml_train.passes.pipeline import Pipeline
from daceml_train.runtime.cache import Cache
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.storage.named_by_user import path_of
from daceml_train.tensor import DType
from daceml_train.transformations.pipelines import TRAINING

CODE_TOLERANCE = {DType.float64: 1e-9, DType.float16: 2e-2, DType.bfloat16: 1e-1}
"""Difference of generated code from float64, relative to the largest element; float32 and the rest: `_FLOAT32`."""
_FLOAT32 = 1e-3


@dataclass(frozen=True)
class Finding:
    """A deviation: the stage (`capture`, `derivative`, `pass`, `partition`, `code`), operator or pass, and where."""

    stage: str
    culprit: str
    where: str
    error: float
    script: Path | None = None

    def __str__(self) -> str:
        place = f" (at {self.where})" if self.where else ""
        shown = f"\nreproduction: {self.script}" if self.script else ""
        return f"{self.stage}: {self.culprit}{place} deviates by {self.error:.1e} of the largest element{shown}"


@dataclass
class Bisection:
    """What the search has compared, and what it found; truthy if it found a deviation."""

    finding: Finding | None = None
    compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.finding is not None

    def __str__(self) -> str:
        result = str(self.finding) if self.finding else "nothing deviates from eager execution"
        return "\n".join([result, *(f"compared: {c}" for c in self.compared), *(f"note: {n}" for n in self.notes)])


def bisect(
    model: torch.nn.Module,
    *inputs: Any,
    pipeline: Pipeline | str | Path = TRAINING,
    folder: Path | str = "bisect",
    code: bool = True,
) -> Bisection:
    """Find the first operator or pass whose result deviates from eager execution of `model` on `inputs` in float64.

    A copy of the model runs. A reproduction is written into `folder`. `code=False` skips generated code, which has to
    be compiled.
    """
    check_module("bisect", model)
    check_flag("code", code)
    search = _Search(Pipeline.of(pipeline), path_of(folder, "folder"), code)
    found, missing = cases(model, inputs)
    search.result.notes += [f"a graph that is not compiled: {reason}" for reason in missing]
    for case in found:
        if search.case(case):
            break
    return search.result


class _Search:
    def __init__(self, pipeline: Pipeline, folder: Path, code: bool) -> None:
        self.pipeline, self.folder, self.code = pipeline, folder, code
        self.result = Bisection()

    def found(self, stage: str, culprit: str, where: str, error: float, script: Path | None = None) -> bool:
        self.result.finding = Finding(stage, culprit, where, error, script)
        return True

    # ---- a captured graph ---------------------------------------------------------------------------------------
    def case(self, case: Case) -> bool:
        """Run all stages of one captured graph; return whether one deviates."""
        reference = None
        if case.captured.random:
            self.result.notes.append("the graph draws random numbers: it is compared with itself, not with PyTorch")
        else:
            try:
                reference = eager(case)
            except Exception as error:  # a model may insist on its element types
                self.result.notes.append(f"PyTorch does not run the graph in float64: {error}")
        if reference is not None and self.capture(case, reference.outputs, reference.writes):
            return True
        graph = case.graph
        for transformation in self.pipeline.level("forward"):
            after = self.run(transformation, graph, case.arrays)
            if after is None:
                return True
            graph = after
        joint, gradients = joint_graph(graph, case)
        arrays = {**case.arrays, **{f"grad_{name}": g for name, g in case.cotangents.items()}}
        arrays = {name: arrays[name] for name in joint.inputs}
        expected = None if reference is None else reference.gradients
        if gradients and self.derivatives(case, graph, joint, gradients, arrays, expected):
            return True
        for transformation in (*self.pipeline.level("distribution"), *self.pipeline.level("intra_operator")):
            after = self.run(transformation, joint, arrays)
            if after is None:
                return True
            joint = after
        for half, given in self.halves(joint, graph, bool(gradients), arrays):
            if self.half(half, given):
                return True
        return bool(self.result)

    def capture(self, case: Case, outputs: Mapping[str, Array], writes: Mapping[str, Array]) -> bool:
        result = interpret(case.graph, case.arrays)
        expected = {**outputs, **writes}
        given = {**dict(zip(case.graph.outputs, result.outputs, strict=True)), **result.writes}
        self.result.compared.append(f"{len(expected)} results of a captured graph of {len(case.graph.nodes)} operators")
        errors = {name: departs(given[name], expected[name]) for name in expected}
        worst = next(((name, e) for name, e in errors.items() if e is not None), None)
        if worst is None:
            return False
        first = first_departing_node(case)
        if first is None:
            return self.found("capture", f"the result %{worst[0]}", "", worst[1])
        node, error = first
        values = {**result.values, **case.arrays}
        part = excerpt(case.graph, [node], list(node.outputs))
        return self.found(
            "capture", str(node), str(node.origin), error, self.operator_script("capture", node, part, values)
        )

    # ---- derivatives --------------------------------------------------------------------------------------------
    def derivatives(
        self,
        case: Case,
        graph: Graph,
        joint: Graph,
        gradients: Sequence[str],
        arrays: Mapping[str, Array],
        expected: Mapping[str, Array] | None,
    ) -> bool:
        derivatives = interpret(joint, arrays).outputs[len(graph.outputs) :]
        if expected is not None:
            errors = [
                departs(g, expected.get(n, np.zeros_like(g))) for n, g in zip(gradients, derivatives, strict=True)
            ]
            self.result.compared.append(f"{len(gradients)} gradients")
            if all(error is None for error in errors):
                return False
        values = {**interpret(graph, case.arrays).values, **case.arrays}
        for node in reversed(graph.nodes):
            error = derivative_error(graph, node, values)
            if error is not None:
                part = excerpt(graph, [node], list(node.outputs))
                script = self.operator_script("derivative", node, part, values)
                return self.found("derivative", str(node), str(node.origin), error, script)
        if expected is None:
            self.result.compared.append(f"the derivatives of {len(graph.nodes)} operators with finite differences")
            return False
        name, worst = next((n, e) for n, e in zip(gradients, errors, strict=True) if e is not None)
        return self.found("derivative", f"the gradient of %{name}, though no operator's alone", "", worst)

    # ---- passes -------------------------------------------------------------------------------------------------
    def run(self, transformation: Pass, graph: Graph, arrays: Mapping[str, Array]) -> Graph | None:
        """The graph after a pass; None, with a finding, if results deviate."""
        try:
            after = checked(transformation, graph)
        except Exception as raised:
            small, given = smallest(graph, arrays, lambda part, _: _raises(transformation, part))
            script = self.pass_script(transformation, small, given)
            cause = raised.__cause__ if isinstance(raised, PassFailed) and raised.__cause__ else raised
            culprit = f"{transformation} raises {type(cause).__name__}: {cause}"
            self.found("pass", culprit, _where(small), float("inf"), script)
            return None
        error = difference(graph, after, arrays)
        self.result.compared.append(f"{transformation} on {len(graph.nodes)} operators")
        if error is None:
            return after

        def fails(part: Graph, values: Mapping[str, Array]) -> bool:
            return difference(part, transformation.run(part), values) is not None

        small, given = smallest(graph, arrays, fails)
        script = self.pass_script(transformation, small, given)
        self.found("pass", str(transformation), _where(small), error, script)
        return None

    def halves(
        self, joint: Graph, graph: Graph, differentiated: bool, arrays: Mapping[str, Array]
    ) -> Iterator[tuple[Graph, dict[str, Array]]]:
        """The graphs that go through the later levels, with their inputs, as in the driver."""
        if not differentiated:
            yield without_dead_code(joint), dict(arrays)
            return
        cut = partition(joint, len(graph.outputs))
        first = {name: arrays[name] for name in cut.forward.inputs}
        result = interpret(cut.forward, first)
        whole = interpret(joint, arrays)
        yield cut.forward, first
        saved = dict(zip(cut.saved, result.outputs[len(graph.outputs) :], strict=True))
        second = {name: saved[name] if name in saved else arrays[name] for name in cut.backward.inputs}
        both = [*result.outputs[: len(graph.outputs)], *interpret(cut.backward, second).outputs]
        errors = [departs(a, b) for a, b in zip(both, whole.outputs, strict=True)]
        worst = next((e for e in errors if e is not None), None)
        if worst is not None:
            self.found("partition", "the partition into forward and backward", "", worst)
            return
        yield cut.backward, second

    def half(self, graph: Graph, arrays: dict[str, Array]) -> bool:
        """The levels after the partition, and the generated code, of one graph."""
        for level in ("fusion", "layout", "global_movement"):
            for transformation in self.pipeline.level(level):
                after = self.run(transformation, graph, arrays)
                if after is None:
                    return True
                graph = after
        return self.code and bool(graph.nodes) and self.generated(graph, arrays)

    # ---- generated code -----------------------------------------------------------------------------------------
    def generated(self, graph: Graph, arrays: Mapping[str, Array]) -> bool:
        """Run the compiled graph, then, if it deviates, each distinct operator by itself."""
        with tempfile.TemporaryDirectory() as cache:
            self.result.compared.append(f"the generated code of {len(graph.nodes)} kernels and calls")
            if code_difference(graph, arrays, cache) is None:
                return False
            values = {**interpret(graph, arrays).values, **arrays}
            seen: set[Any] = set()
            for node in graph.nodes:
                part = excerpt(graph, [node], list(node.outputs))
                key = repr((node.op, [part.tensors[i] for i in node.inputs]))
                if key in seen:
                    continue
                seen.add(key)
                error = code_difference(part, {name: values[name] for name in part.inputs}, cache)
                if error is not None:
                    script = self.operator_script("code", node, part, values)
                    return self.found("code", str(node), str(node.origin), error, script)
            whole = write(self.folder / "code.py", "Generated code deviates", graph, arrays, _IMPORTS["code"], _CODE)
        return self.found("code", "the program as a whole, though no kernel alone", "", float("inf"), whole)

    # ---- scripts ------------------------------------------------------------------------------------------------
    def pass_script(self, transformation: Pass, graph: Graph, arrays: Mapping[str, Array]) -> Path:
        level = transformation.level
        text = f"(transformation,) = dt.Pipeline.parse({f'{level}: {transformation}'!r})\n{_PASS}"
        imports = _import(type(transformation)) + _operators(graph) + _IMPORTS["pass"]
        path = self.folder / f"{transformation.name}.py"
        return write(path, f"{transformation} deviates", graph, arrays, imports, text)

    def operator_script(self, stage: str, node: Node, graph: Graph, values: Mapping[str, Array]) -> Path:
        arrays = {name: np.asarray(values[name]) for name in graph.inputs}
        check = {"derivative": _DERIVATIVE, "code": _CODE, "capture": _CAPTURE}[stage]
        name = "".join(c if c.isalnum() else "_" for c in node.op.label)
        imports = _operators(graph) + _IMPORTS[stage]
        path = self.folder / f"{stage}_{name}.py"
        return write(path, f"The {stage} of {node} deviates", graph, arrays, imports, check)


def joint_graph(graph: Graph, case: Case) -> tuple[Graph, list[str]]:
    """The graph with gradients as further outputs, and their inputs."""
    joint = graph.copy()
    # forward passes keep the order of outputs, not their names
    renamed = dict(zip(case.graph.outputs, graph.outputs, strict=True))
    given: dict[str, Any] = {}
    for name in case.cotangents:
        seed = joint.input(f"grad_{name}", graph.tensors[renamed[name]], Role.cotangent)
        target = renamed[name]
        given[target] = given[target] + seed if target in given else seed
    found = differentiate(joint, given, case.wrt) if given and case.wrt else {}
    gradients = {name: value for name, value in found.items() if value is not None}
    if not gradients:
        return graph, []
    joint.outputs += [value.name for value in gradients.values()]
    return joint, list(gradients)


def difference(before: Graph, after: Graph, arrays: Mapping[str, Array]) -> float | None:
    """The difference of the results of two graphs on the same inputs; None if there is none."""
    expected, given = interpret(before, arrays), interpret(after, arrays)
    pairs = [*zip(given.outputs, expected.outputs, strict=True)]
    pairs += [(given.writes.get(n, np.asarray(arrays[n])), value) for n, value in expected.writes.items()]
    return next((error for a, b in pairs if (error := departs(a, b)) is not None), None)


def derivative_error(graph: Graph, node: Node, values: Mapping[str, Array]) -> float | None:
    """The deviation of an operator's derivative from finite differences at these values; None if there is none.

    Along a random direction, at two widths: where these differ, the operator is not smooth there, and nothing is said.
    """
    part = excerpt(graph, [node], list(node.outputs))
    wrt = [n for n in part.inputs if part.tensors[n].dtype.is_float and part.tensors[n].dtype.short[0] != "c"]
    results = [n for n in node.outputs if part.tensors[n].dtype.is_float]
    if not wrt or not results or isinstance(node.op, Uniform | Kernel):
        return None
    arrays = {name: np.asarray(values[name]) for name in part.inputs}
    random = np.random.default_rng(1)
    seeds = {name: random.standard_normal(np.shape(values[name])) for name in results}
    direction = {name: random.standard_normal(arrays[name].shape) for name in wrt}
    joint = part.copy()
    of = {name: joint.input(joint.fresh(f"grad_{name}"), joint.tensors[name], Role.cotangent) for name in results}
    try:
        found = differentiate(joint, of, wrt)
    except Exception:  # an operator without a derivative: nothing flows through it
        return None
    joint.outputs = [value.name for value in found.values() if value is not None]
    gradients = interpret(joint, {**arrays, **{of[n].name: seeds[n] for n in results}}).outputs
    kept = [name for name, value in found.items() if value is not None]
    ours = sum(float((g * direction[n]).sum()) for n, g in zip(kept, gradients, strict=True))

    def along(width: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = {n: a + sign * width * direction[n] if n in kept else a for n, a in arrays.items()}
            outputs = dict(zip(part.outputs, interpret(part, moved).outputs, strict=True))
            ends.append(sum(float((outputs[n] * seeds[n]).sum()) for n in results))
        return (ends[0] - ends[1]) / (2 * width)

    wide, narrow = along(1e-5), along(1e-6)
    scale = max(
        abs(narrow), sum(float(np.abs(g * direction[n]).sum()) for n, g in zip(kept, gradients, strict=True)), 1e-9
    )
    if not np.isfinite(scale) or abs(wide - narrow) > 1e-4 * scale:
        return None
    error = abs(ours - narrow) / scale
    return error if error > 1e-3 else None


def code_difference(graph: Graph, arrays: Mapping[str, Array], cache: str) -> float | None:
    """The deviation of the compiled graph from its meaning on these inputs; None if there is none."""
    graph = graph.copy()
    tensors = [_tensor(np.asarray(arrays[n]), entry.tensor) for n, entry in graph.inputs.items()]
    rounded = {name: array(t) for name, t in zip(graph.inputs, tensors, strict=True)}
    expected = interpret(graph, rounded)
    compiled = compile_differentiable(graph, (), (), Settings(Pipeline(), Cache(Path(cache))))
    outputs = run_with_layout(compiled.forward, tensors)[: len(graph.outputs)]
    after = {name: array(t) for name, t in zip(graph.inputs, tensors, strict=True) if name in graph.writes}
    pairs = [
        (array(t), value, graph.tensors[name].dtype)
        for t, value, name in zip(outputs, expected.outputs, graph.outputs, strict=True)
    ]
    pairs += [(after[n], value, graph.tensors[n].dtype) for n, value in expected.writes.items()]
    errors = (departs(a, b, CODE_TOLERANCE.get(dtype, _FLOAT32)) for a, b, dtype in pairs)
    return next((error for error in errors if error is not None), None)


def _tensor(value: Array, type_: Any) -> torch.Tensor:
    order = type_.order or tuple(range(value.ndim))
    tensor = torch.empty([value.shape[d] for d in order], dtype=torch_dtype(type_.dtype))
    return tensor.permute([order.index(d) for d in range(value.ndim)]).copy_(torch.as_tensor(value))


def _where(graph: Graph) -> str:
    return next((str(node.origin) for node in graph.nodes if str(node.origin)), "")


def _raises(transformation: Pass, graph: Graph) -> bool:
    try:
        checked(transformation, graph)
    except Exception:
        return True
    return False


def _import(kind: Callable[..., Any]) -> str:
    module = kind.__module__
    return "" if module.startswith("daceml_train.") else f"import {module}  # noqa: F401, defines {kind.__qualname__}\n"


def _operators(graph: Graph) -> str:
    return "".join(dict.fromkeys(_import(type(node.op)) for node in graph.nodes))


_IMPORTS = {
    "pass": "from daceml_train.debug.search import difference\n",
    "derivative": "from daceml_train.debug.search import derivative_error\n",
    "code": "import tempfile\n\nfrom daceml_train.debug.search import code_difference\n",
    "capture": "",
}
_REPORT = """print("deviates by", error)
sys.exit(error is not None)
"""
_PASS = f"""after = transformation.run(graph)
print(graph, after, sep="\\n\\n")
error = difference(graph, after, inputs)
{_REPORT}"""
_DERIVATIVE = f"""error = derivative_error(graph, graph.nodes[-1], {{**inputs, **interpret(graph, inputs).values}})
{_REPORT}"""
_CODE = f"""error = code_difference(graph, inputs, tempfile.mkdtemp())
{_REPORT}"""
_CAPTURE = """print(graph)
for name, value in zip(graph.outputs, interpret(graph, inputs).outputs, strict=True):
    print(name, value)
print("compare these with what PyTorch computes")
sys.exit(1)
"""
