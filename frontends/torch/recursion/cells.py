"""Cells: the structures of runs, as functions of their inputs for one call, or for the rows of many calls."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import convert_frame
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from daceml_train.analysis.sizes import bind
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import capture
from daceml_train.frontends.torch.capture.trace import first_line, silent
from daceml_train.frontends.torch.recursion.aliases import is_alias
from daceml_train.frontends.torch.recursion.counts import COUNTS, for_any_count
from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta, known, meta, meta_of, set_value
from daceml_train.frontends.torch.recursion.runs import Given, Reference, Run, Shared, Step, decoded
from daceml_train.graph.graph import Graph
from daceml_train.tensor import Dim

IN_PLACE = "changes a tensor in place"
EFFECT = "does more than compute a value"
LOOK = "a look at a value"
RANDOM = "draws random numbers, whose order is the user's program's"


TRACING = convert_frame.compile_lock
"""Whoever traces holds it, TorchDynamo included: PyTorch's tracers replace methods of all modules meanwhile."""
NUMBER = meta((), torch.int64, torch.device("cpu"), False)


class _Watch(TorchDispatchMode):
    """Notes operators that draw random numbers, or that change an operand; they may change what they have made."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands = [(t, t._version) for t in operands]
        self.random = self.moved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        # its schema does not say that it moves the running statistics
        statistics = func is torch.ops.aten.native_batch_norm.default and args[5] and args[3] is not None
        self.moved = self.moved or bool(statistics)
        return func(*args, **(kwargs or {}))

    @property
    def reason(self) -> str:
        """Why what was watched cannot wait; empty if it can."""
        if self.moved or any(t._version != version for t, version in self.operands):
            return IN_PLACE
        return RANDOM if self.random else ""


class Fakes:
    """Tensors without data, on which operators are run once to learn the types of their results."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.by_meta: dict[Meta, torch.Tensor] = {}

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin of a tensor."""
        return self.of(meta_of(tensor))

    def of(self, m: Meta) -> torch.Tensor:
        """A fake tensor of this type."""
        if m not in self.by_meta:
            with torch._C.DisableTorchFunction(), self.mode:
                result = torch.empty(m.shape, dtype=m.dtype, device=m.device)
                if m.requires_grad:
                    with torch.enable_grad():  # no leaf, which PyTorch would refuse to change in place
                        result = result.requires_grad_().clone()
            self.by_meta[m] = result
        return self.by_meta[m]

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str]:
        """The result of a function on the types of its arguments, and why it cannot wait; None if that needs values."""

        def fake(a: Any) -> Any:
            if type(a) is Lazy:
                return self.of(a.meta)
            return self.of_tensor(a) if isinstance(a, torch.Tensor) else a

        leaves, spec = pytree.tree_flatten((args, kwargs))
        fakes = [fake(a) for a in leaves]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        watch = _Watch([a for a in fakes if isinstance(a, torch.Tensor)])
        try:
            with silent(), torch._C.DisableTorchFunction(), self.mode, watch:
                return function(*args, **kwargs), watch.reason
        except Exception:  # whatever it is, PyTorch raises it on the values
            return None, LOOK


def step(structures: Any, at: Step, run: Run, key: tuple[Any, ...], keywords: bool) -> Step:
    """The point on a path after one more operator: what it returns for these types."""
    fakes: Fakes = structures.fakes
    examples = [e for s in at.operators() for e in s.examples]
    metas = list(at.inputs)

    def of(entry: Any) -> Any:
        if type(entry) is Reference:
            return examples[entry.number] if entry.local else fakes.of(metas[entry.number])
        if type(entry) is Given:
            metas.append(entry.meta)
            return fakes.of(entry.meta)
        return entry.fake

    output = Step(before=at, operator=key, keywords=keywords)
    args = [decoded(e, of) for e in key[2:]]
    kwargs = args.pop() if keywords else {}
    output.refused = _of_all_indices(key[0], args, kwargs)
    if output.refused:
        return output
    operands = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    watch = _Watch(operands)
    try:
        with silent(), torch._C.DisableTorchFunction(), fakes.mode, watch, torch.set_grad_enabled(key[1]):
            result = key[0](*args, **kwargs)
    except Exception as error:  # whatever it is, PyTorch raises it on the values
        output.refused = LOOK if "data" in type(error).__name__.lower() or not str(error) else first_line(error)
        return output
    if watch.reason:
        output.refused = watch.reason
        return output
    output.inputs = tuple(metas)
    if isinstance(result, torch.Tensor):
        output.examples = (result,)
    elif isinstance(result, tuple | list) and result and all(isinstance(r, torch.Tensor) for r in result):
        output.examples, named = (
            tuple(result),
            hasattr(result, "_fields") or type(result).__module__ == "torch.return_types",
        )
        output.kind = type(result) if named else (list if isinstance(result, list) else tuple)
    elif any(isinstance(r, torch.Tensor) for r in pytree.tree_leaves(result)):
        output.refused = f"it returns {type(result).__name__}"
        return output
    elif _plain(result):
        output.constant = result
        return output
    else:
        output.refused = EFFECT if result is None else f"it returns {type(result).__name__}"
        return output
    output.made = tuple(map(meta_of, output.examples))
    output.alias = is_alias(output.examples, operands)
    output.aliased = at.aliased or output.alias
    output.count = at.count + len(output.made)
    return output


def _of_all_indices(function: Any, args: list[Any], kwargs: Any) -> str:
    """Why the gradient of a table is another one if it is that of many calls; empty if it is their sum."""
    if function is torch.Tensor.as_subclass:
        return "it makes a tensor of a class"
    position = {F.embedding: 6, F.embedding_bag: 7}.get(function)
    if position is None:
        return ""
    if kwargs.get("scale_grad_by_freq") or args[5:6] == [True]:
        return "scale_grad_by_freq counts the indices of a call"
    return "its gradient is a sparse tensor" if kwargs.get("sparse") or args[position:][:1] == [True] else ""


def _plain(result: Any) -> bool:
    """Whether a result is one of Python or a property of tensors, which is the same for all of this type."""
    if isinstance(result, tuple | list):
        return all(map(_plain, result))
    return (
        isinstance(
            result, bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format
        )
        or result is NotImplemented
    )


def evaluate(operators: Sequence[Step], inputs: Sequence[Any], shared: Callable[[Shared], Any]) -> list[torch.Tensor]:
    """All values of a run on its inputs."""
    values: list[torch.Tensor] = []
    given = iter(inputs)

    def of(entry: Any) -> Any:
        if type(entry) is Reference:
            return values[entry.number] if entry.local else inputs[entry.number]
        return next(given) if type(entry) is Given else shared(entry)

    for each in operators:
        assert each.operator is not None
        function, grad, *entries = each.operator
        args = [decoded(e, of) for e in entries]
        kwargs = args.pop() if each.keywords else {}
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            result = function(*args, **kwargs)
        results = [result] if each.kind is None else list(result)
        values += results if grad else [t.detach() for t in results]
    return values


def replay(run: Run) -> None:
    """Compute the values of one run as PyTorch does."""
    operators = run.at.operators()
    results = evaluate(operators, [known(a) for a in run.inputs], lambda shared: shared.tensor)
    for value, tensor in zip(run.values, results, strict=True):
        if value is not None:
            set_value(value, tensor)


def failing(runs: list[Run]) -> list[Any]:
    """The inputs of the first run that raises an error by itself; none if no run does."""
    for run in sorted(runs, key=lambda each: each.height):
        given = list(run.inputs)
        with_tensors([run])
        try:
            replay(run)
        except Exception:  # the one that is looked for
            return given
    return []


def with_tensors(runs: Iterable[Run]) -> None:
    """Replace lists of numbers among inputs by the tensors that they stand for."""
    for run in runs:
        run.inputs = [torch.tensor(a) if type(a) is list else a for a in run.inputs]


class Cell:
    """A structure of runs: for rows of inputs, the rows of its outputs. Its outputs are what was ever read of it."""

    def __init__(self, at: Step) -> None:
        self.operators = at.operators()
        self.inputs = at.inputs
        self.metas = [m for s in self.operators for m in s.made]
        found: dict[Shared, None] = {}

        def note(entry: Any) -> Any:
            if type(entry) is Shared:
                found.setdefault(entry)
            return entry

        for each in self.operators:
            assert each.operator is not None
            for entry in each.operator[2:]:
                decoded(entry, note)
        self.shared = list(found)
        self.outputs: tuple[int, ...] = ()
        self.traced: fx.GraphModule | None = None
        self.given = self.inputs or (NUMBER,)
        """The types of the inputs; a cell without any takes the number of the call."""
        self.sources: list[dict[Any, None]] = [{} for _ in self.inputs]
        """Per input, what it was ever taken from, in the order of learning; see `kinds`."""
        self.uses = 0
        """How often rows were computed: a trace takes as long as many calls, and a cell may never come again."""
        self.alone = ""
        """Why calls are computed one by one; empty if PyTorch has computed several at once."""

    def want(self, outputs: set[int]) -> None:
        """Have at least these outputs."""
        if not outputs <= set(self.outputs):
            self.outputs, self.traced = tuple(sorted(outputs.union(self.outputs))), None

    def single(self, inputs: Sequence[Any], shared: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs of one call."""
        tensors = dict(zip(self.shared, shared, strict=True))
        values = evaluate(self.operators, inputs, tensors.__getitem__)
        return [values[k] for k in self.outputs]

    def rows(self, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        """The outputs of `count` calls, whose inputs are rows."""
        self.uses += 1
        if count > 1 and not self.alone and (self.uses > 1 or self.traced is not None):
            try:
                return self._mapped(inputs, shared, count) if not inputs else list(self._any_count()(*inputs, *shared))
            except Exception as error:  # PyTorch does not batch an operator, or one raises, as it will again
                results = self._one_by_one(inputs, shared, count)
                self.alone = first_line(error)
                return results
        return self._one_by_one(inputs, shared, count)

    def _one_by_one(
        self, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], count: int
    ) -> list[torch.Tensor]:
        calls = [self.single([t[k] for t in inputs], shared) for k in range(count)]
        return [torch.stack(results) for results in zip(*calls, strict=True)]

    @property
    def batches(self) -> bool:
        """Whether there is a trace for any number of calls."""
        try:
            return self._any_count() is not None
        except Exception:  # whatever it is, `graph` has told it
            return False

    @functools.cached_property
    def flows(self) -> list[tuple[frozenset[int], frozenset[Shared]]]:
        """The inputs and the shared tensors on which each value depends with a gradient."""
        flows: list[tuple[frozenset[int], frozenset[Shared]]] = []
        numbers = itertools.count()
        inputs, shared = set[int](), set[Shared]()

        def note(entry: Any) -> None:
            if type(entry) is Shared:
                shared.update([entry] if entry.tensor.requires_grad else [])
            elif type(entry) is Reference and entry.local:
                inputs.update(flows[entry.number][0])
                shared.update(flows[entry.number][1])
            elif self.inputs[number := entry.number if type(entry) is Reference else next(numbers)].requires_grad:
                inputs.add(number)

        for each in self.operators:
            assert each.operator is not None
            inputs, shared = set(), set()
            for entry in each.operator[2:]:
                decoded(entry, note)
            found = frozenset(inputs), frozenset(shared)
            flows += [found if m.requires_grad else (frozenset(), frozenset()) for m in each.made]
        return flows

    @property
    def differentiated(self) -> set[Shared]:
        """The shared tensors on which outputs depend with a gradient."""
        return {shared for k in self.outputs for shared in self.flows[k][1]}

    def _mapped(self, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        number = torch.arange(count)
        dims = (*[0] * len(inputs), *[None] * len(shared), 0)

        def body(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = self.single(given[: len(inputs)], given[len(inputs) : -1])
            return tuple(results)

        return list(torch.func.vmap(body, in_dims=dims)(*inputs, *shared, number))

    def _any_count(self) -> fx.GraphModule:
        """The operators of PyTorch that compute the rows, for any number of them."""
        with TRACING:
            if self.traced is None:
                self.traced = self._trace()
            return self.traced

    def _trace(self) -> fx.GraphModule:
        shared = [s.tensor for s in self.shared]
        dims = (*[0] * len(self.given), *[None] * len(shared))

        def body(*given: torch.Tensor) -> Any:
            return tuple(self.single(given[: len(self.given)], given[len(self.given) :]))

        def traced(count: int) -> fx.GraphModule:
            examples = [torch.zeros(count, *m.shape, dtype=m.dtype, device=m.device) for m in self.given]
            mapped = torch.func.vmap(body, in_dims=dims)
            result = make_fx(mapped, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *examples, *[t.detach() for t in shared]
            )
            result.graph.eliminate_dead_code()
            return result

        return for_any_count({count: traced(count) for count in COUNTS})

    def graph(self, rows: Dim) -> Graph:
        """The rows as a graph of operators, whose inputs are `given`, then `shared`.

        Raises `Unsupported` where it cannot be captured.
        """
        module = copy.deepcopy(self._any_count())
        (result,) = module.graph.find_nodes(op="output")
        with module.graph.inserting_before(result):  # results of their own, none of which is a view of another
            copies = [module.graph.call_function(torch.ops.aten.clone.default, (n,)) for n in result.args[0]]
        result.args = (tuple(copies),)
        module.recompile()
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        examples = []
        for m in self.given:
            dims = [DimDynamic.DUCK, *[DimDynamic.STATIC] * len(m.shape)]  # one symbol for the rows of all
            context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
            example = torch.zeros(COUNTS[-1], *m.shape, dtype=m.dtype, device=m.device)
            examples.append(mode.from_tensor(example, symbolic_context=context))
        fixed = [mode.from_tensor(s.tensor.detach(), static_shapes=True) for s in self.shared]
        captured = capture(module, [*examples, *fixed])
        found = captured.graph
        own = len(found.inputs) == len(self.given) + len(self.shared)
        if found.writes or captured.random or not own or len(found.symbols) != 1:
            raise Unsupported("a cell that changes tensors, draws random numbers, or reads tensors that are constants")
        names = {next(iter(found.symbols)).name: rows}
        graph = Graph("cell")
        for name, entry in found.inputs.items():
            graph.input(name, bind(entry.tensor, names))
        for node in found.nodes:
            graph.append(bind(node.op, names), node.inputs, node.outputs)
        graph.outputs = [found.outputs[source.index] for source in captured.outputs]
        return graph
