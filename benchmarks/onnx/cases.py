"""The official ONNX backend cases (`onnx.backend.test`), each through `optimize`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import daceml_train as dt
from daceml_train.driver.module import state_of
from daceml_train.frontends.onnx import elements

RIGHT, WRONG, REFUSED, RAISED, RANDOM, ROUNDING = "right", "wrong", "refused", "raised", "random", "rounding"

EXCLUDED = {
    "test_bernoulli": "draws random numbers",
    "test_bernoulli_double": "draws random numbers",
    "test_bernoulli_double_expanded": "draws random numbers",
    "test_bernoulli_expanded": "draws random numbers",
    "test_bernoulli_seed": "draws random numbers; ONNX leaves the generator open",
    "test_bernoulli_seed_expanded": "draws random numbers; ONNX leaves the generator open",
    "test_training_dropout": "draws random numbers",
    "test_training_dropout_default": "draws random numbers",
    "test_training_dropout_default_mask": "draws random numbers",
    "test_training_dropout_mask": "draws random numbers",
}
"""Cases whose numbers no two implementations share: shapes and types are compared, values are not."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case: `kind`, a sentence where it is not right, and how many graphs were compiled."""

    case: str
    suite: str
    kind: str
    why: str = ""
    operators: str = ""
    graphs: int = 0
    breaks: int = 0


@dataclass(frozen=True)
class Light:
    """A whole network of the suite "light": its weights are constant fills, its output is stored beside it."""

    name: str
    path: Path
    rtol: float = 1e-3
    atol: float = 1e-5

    @property
    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path)

    @property
    def data_sets(self) -> list[tuple[list[Any], list[Any]]]:
        """The inputs that ONNX's own runner generates for these networks, and the stored output."""
        declared = _inputs(self.model)
        inputs = [Runner.generate_dummy_data(x, seed=0, name=self.name, random=False) for x in declared]
        output = onnx.TensorProto.FromString(self.path.with_name(f"{self.path.stem}_output_0.pb").read_bytes())
        return [(inputs, [output])]


def cases(suite: str) -> list[Any]:
    """The cases of a suite: node, simple or light."""
    if suite == "light":
        folder = Path(onnx.__file__).parent / "backend/test/data/light"
        return [Light(path.stem, path) for path in sorted(folder.glob("*.onnx"))]
    return list(load_model_tests(kind=suite))


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The graph's inputs that are no initializers."""
    held = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def run(case: Any, suite: str, cache: str) -> Outcome:
    """One case, forward, in a fresh TorchDynamo."""
    torch._dynamo.reset()
    model = case.model or onnx.load(str(Path(case.model_dir) / "model.onnx"))
    operators = ", ".join(sorted({node.op_type for node in model.graph.node}))
    try:
        module = dt.optimize(dt.load_onnx(model), cache=cache)
    except dt.Unsupported as error:
        return Outcome(case.name, suite, REFUSED, str(error), operators)
    except Exception as error:
        return Outcome(case.name, suite, RAISED, f"import: {type(error).__name__}: {error}", operators)
    state = state_of(module)
    assert state is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for inputs, outputs in _data(case, model):
                result = module(*inputs)
                results = [result] if len(outputs) == 1 else list(result)
                for name, got, want in zip(model.graph.output, results, outputs, strict=True):
                    if sentence := difference(got, want, case.rtol, case.atol, values=case.name not in EXCLUDED):
                        exact = _as_eager(model, inputs, results, case)
                        kind = ROUNDING if suite == "light" and exact else WRONG
                        return Outcome(case.name, suite, kind, f"{name.name}: {sentence}", operators, *_graphs(state))
    except dt.Unsupported as error:
        return Outcome(case.name, suite, REFUSED, str(error), operators)
    except Exception as error:
        return Outcome(case.name, suite, RAISED, f"{type(error).__name__}: {str(error)[:300]}", operators)
    kind = RANDOM if case.name in EXCLUDED else RIGHT
    return Outcome(case.name, suite, kind, EXCLUDED.get(case.name, ""), operators, *_graphs(state))


def _graphs(state: Any) -> tuple[int, int]:
    return state.backend.graphs, len(state.backend.breaks)


def _as_eager(model: onnx.ModelProto, inputs: list[Any], results: list[Any], case: Any) -> bool:
    """Whether eager execution computes the same results on this processor.

    The networks of constant fills sum thousands of equal numbers, after which classes that tie in exact arithmetic
    differ by rounding, and softmax makes that large: no result of another library is comparable then.
    """
    with torch.no_grad():
        eager = dt.load_onnx(model)(*inputs)
    wanted = [eager] if len(results) == 1 else list(eager)
    return not any(difference(got, want, case.rtol, case.atol) for got, want in zip(results, wanted, strict=True))


def _data(case: Any, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield [value(x) for x in inputs], [value(x) for x in outputs]
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        yield (
            [_stored(folder / f"input_{i}.pb", each) for i, each in enumerate(_inputs(model))],
            [_stored(folder / f"output_{i}.pb", each) for i, each in enumerate(model.graph.output)],
        )


def _stored(path: Path, declared: onnx.ValueInfoProto) -> Any:
    data = path.read_bytes()
    kind = declared.type.WhichOneof("value")
    if kind == "sequence_type":
        return [value(x) for x in numpy_helper.to_list(onnx.SequenceProto.FromString(data))]
    if kind == "optional_type":
        found = numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
        return None if found is None else value(found)
    return value(onnx.TensorProto.FromString(data))


def value(given: Any) -> Any:
    """A test's input or output as tensors, lists of them, or None."""
    if isinstance(given, list):
        return [value(item) for item in given]
    if given is None or isinstance(given, torch.Tensor):
        return given
    if isinstance(given, onnx.TensorProto):
        return elements.tensor(given)
    array = np.asarray(given)
    name = array.dtype.name
    if array.dtype.kind in "OSU":
        raise dt.Unsupported("strings are not computed with")
    wide = name.startswith(("bfloat", "float8"))
    return elements.from_numpy(array, getattr(torch, name) if wide else torch.from_numpy(array.reshape(-1)[:0]).dtype)


def difference(got: Any, want: Any, rtol: float, atol: float, values: bool = True) -> str:
    """A sentence on what differs; empty if nothing does.

    Tolerances are the case's own, but no finer than two roundings of the element type: expected values of 16-bit
    cases were rounded in another order, and those of transforms are rounded relative to the greatest.
    """
    if isinstance(want, list):
        if len(got) != len(want):
            return f"a sequence of {len(got)}, expected {len(want)}"
        return next((text for g, w in zip(got, want, strict=True) if (text := difference(g, w, rtol, atol))), "")
    if want is None:
        return "" if got is None else "a value where none is expected"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    if not values:
        return ""
    if want.is_floating_point():
        eps = torch.finfo(want.dtype).eps
        finite = want.double()[want.double().isfinite()].abs()
        greatest = float(finite.max()) if finite.numel() else 0.0
        rtol, atol = max(rtol, 2 * eps), max(atol, 4 * eps * greatest)
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = got.detach().to(wide), want.to(wide)
    if torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    return f"differs by up to {float((a - b).abs().nan_to_num(torch.inf).max()):.3g}"
