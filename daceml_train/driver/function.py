"""A compiled graph at run time: a callable that TorchDynamo's code calls, differentiable by autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import torch
import torch.utils._pytree as pytree

from daceml_train.driver.backward_pass import Call, Second, gradients_of, of_leaves, only_in_pytorch, version_of
from daceml_train.driver.binding import (
    apart,
    counted,
    differentiable_outputs,
    input_tensors,
    laid_out,
    random_inputs,
    results_of,
    shares_memory,
    sizes_of,
)
from daceml_train.driver.bound_optimizer import is_unresolved
from daceml_train.driver.faster import NEW_KINDS_SLOWER, NewSizes
from daceml_train.driver.goals import Differentiable
from daceml_train.driver.native_call import Strides, native_call
from daceml_train.driver.prepacked import PrepackedWeights
from daceml_train.errors import why
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.frontends.torch.results import OutputSource
from daceml_train.graph.graph import Role
from daceml_train.graph.node import SEED
from daceml_train.lowering.device import CPU, GPU
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import InputMismatch
from daceml_train.runtime.gpu.cuda_graph_pair import CudaGraphPairs, Ticket
from daceml_train.runtime.native_library import library
from daceml_train.tensor import evaluate

FORWARD_MODE = "a call inside forward-mode differentiation, which PyTorch runs"
SHARED = "an argument, a parameter, or a buffer shares memory with one that the model writes"
"""Why PyTorch runs a call of a compiled graph."""


def draw_seed() -> torch.Tensor:
    """A 0-d int64 seed from PyTorch's CPU generator."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_()


SECOND_ORDER = 3
"""After so many gradients of gradients, a graph of which most calls have one is left to PyTorch."""

DIFFERENTIATED_AGAIN = "most of its gradients are differentiated again, which PyTorch does"
"""Why PyTorch runs all calls of such a graph."""

STILL_PACKED = "weights are packed at each call, since they change and the program for that could not be compiled"
"""What is noted where `again` fails."""

COUNTERS = 16
"""Elements of a buffer that is copied for the backward pass, which takes about a microsecond."""


def run_with_layout(executable: Executable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run; an input whose memory is not laid out as the program's, or that is conjugated or negated lazily, is copied.

    What is written is copied back.
    """
    try:
        return executable(inputs)
    except InputMismatch:
        return _run_on_copies(executable, inputs)


def _run_on_copies(executable: Executable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    value = dict(zip(executable.program.symbols, executable.sizes_of(inputs), strict=True))
    copied = []
    written = []
    for tensor, expected in zip(inputs, executable.program.inputs, strict=True):
        strides = tuple(evaluate(s, value) for s in expected.strides)
        if expected.packing is None and (is_unresolved(tensor) or tensor.stride() != strides):
            copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            written += [(tensor, copy)] if expected.mutable else []
            tensor = copy.copy_(tensor.detach())
        copied.append(tensor)
    results = executable(copied)
    with torch.no_grad():
        for tensor, copy in written:
            tensor.copy_(copy)
    return results


class CompiledGraph:
    """A captured graph as a function of its placeholders' values.

    `eager` is the same graph as PyTorch runs it, for the gradient of a gradient. `cuda_graphs`: on a GPU, each of its
    programs becomes one launch. `note` is called with the reason why PyTorch runs a call instead, `left` with why
    it runs calls of new sizes; None: it never does. `again` compiles an inference whose weights change from call to
    call.
    """

    def __init__(
        self,
        captured: Captured,
        compiled: Differentiable,
        eager: Callable[..., Any],
        cuda_graphs: bool = False,
        note: Callable[[str], None] | None = None,
        copied: Collection[int] = (),
        again: Callable[[], Differentiable] | None = None,
        left: Callable[[str], None] | None = None,
    ) -> None:
        self.note, self.again = note, again
        self.second: Second | None = None
        self._connected: Callable[[Sequence[Any], Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
        """Runs calls whose gradients are differentiated again, once most are."""
        self._runs = self._seconds = 0
        self._second_order = False
        """Whether PyTorch runs all calls, whose gradients are differentiated again."""
        self.captured, self.compiled, self.eager = captured, compiled, eager
        names = list(captured.graph.inputs)
        self.names = names
        self.kept = [names.index(name) for name in compiled.kept]
        self.copied = {names.index(s.name) for s in captured.inputs if s.name in names and s.position in copied}
        """Inputs that are copied for the backward pass: later code may change them before it runs."""
        fixed = [name for name in names if name != SEED and name not in captured.draws]
        if not isinstance(compiled.forward.device, GPU):
            self.copied |= {names.index(name) for name in compiled.kept if name in fixed and _counts(captured, name)}
        self.written = [fixed.index(name) for name in captured.graph.writes]
        self.changes = [(names.index(name), count) for name, count in captured.changes.items()]
        self.wanted = {names.index(name): k for k, name in enumerate(compiled.gradients)}
        self.unwanted = [i for i in range(len(names)) if i not in self.wanted] if self.wanted else []
        self.differentiable = frozenset(differentiable_outputs(captured))
        self.only_in_pytorch = only_in_pytorch(self)
        self.cuda_graphs = self._new_cuda_graphs() if cuda_graphs else None
        outside: Any = torch._dynamo.disable  # it is called where TorchDynamo is at work
        self._native = native_call(self, outside(self._after_draws), outside(self._gradients))
        self._ran: tuple[BoundPlan | None, Strides] = None, ()
        """What the last call in Python ran, if no input was copied, and per result the strides of its copy, if any."""
        self._backward_plan: BoundPlan | None = None
        forward, self._left = compiled.forward, left
        varies = isinstance(forward, Executable) and forward.device is CPU and bool(forward.program.symbols)
        self._new_sizes = NewSizes() if left is not None and varies else None

    @property
    def runs(self) -> int:
        """How often it has run."""
        return self._runs + self.native_runs

    @property
    def native_runs(self) -> int:
        """How often it has run without Python."""
        return 0 if self._native is None else self._native.runs

    @property
    def entry(self) -> Callable[..., Any]:
        """What runs a call: without Python once that is settled."""
        if self._native is None:
            return self
        function, draws = self._native.function, list(self.captured.draws.values())
        if not draws:
            return cast("Callable[..., Any]", function)

        def draw_and_call(*arguments: Any) -> Any:
            if torch.autograd.forward_ad._current_level >= 0:
                return self(*arguments)
            return function(*[draw({}) for draw in draws], *arguments)

        return draw_and_call

    def _new_cuda_graphs(self) -> CudaGraphPairs | None:
        """The CUDA graphs of both programs: parameters and buffers have fixed addresses, all other inputs move."""
        device, inputs = self.compiled.forward.device, self.compiled.forward.program.inputs
        if not isinstance(device, GPU):
            return None
        moving = [i for i, entry in enumerate(inputs) if entry.role not in (Role.parameter, Role.buffer)]
        back: list[int] = []
        if self.compiled.backward is not None:
            count = len(self.compiled.backward.program.inputs)
            back = [k for k, i in enumerate(self.kept) if i in moving]
            back += range(count - len(self.compiled.cotangents), count)
        return CudaGraphPairs(device, self.compiled.results or len(self.captured.graph.outputs), moving, back)

    def forward(
        self, tensors: Sequence[torch.Tensor], results: int | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], Ticket | None]:
        """Run the forward program; the first `results` outputs, as eager execution lays them out, and the others.

        None: all outputs, and no backward pass follows. The ticket is for `backward`.
        """
        with counted(tensors, self.changes):
            outputs, ran, prepacked = self._run(tensors, results is not None and self.compiled.backward is not None)
        saved = [] if results is None else outputs[results:]
        found = apart(self._laid_out(outputs[:results], tensors), saved)
        if self._native is not None and not isinstance(ran, Ticket):
            pairs = zip(found, outputs, strict=False)
            self._use_natively((ran, tuple(None if a is b else a.stride() for a, b in pairs)), prepacked)
        return found, saved, ran if isinstance(ran, Ticket) else None

    def _run(
        self, tensors: Sequence[torch.Tensor], awaited: bool
    ) -> tuple[list[torch.Tensor], Ticket | BoundPlan | None, PrepackedWeights | None]:
        """The outputs; on a GPU the ticket, else the plan, unless inputs were copied; and what packed the weights."""
        compiled = self._compiled_again()  # another thread may replace it
        executable, prepacked = compiled.forward, compiled.prepacked
        if self.cuda_graphs is not None:
            plan = executable.plan(executable.sizes_of(tensors))
            try:
                return *self.cuda_graphs.forward(plan, tensors, awaited), prepacked
            except InputMismatch:
                pass
        if prepacked is not None:
            tensors = prepacked(tensors, run_with_layout)
        if self._native is None:
            return run_with_layout(executable, tensors), None, prepacked
        return *_run_on_plan(executable, tensors), prepacked

    def _compiled_again(self) -> Differentiable:
        """The programs, compiled once more where weights turn out to change from call to call."""
        compiled, again = self.compiled, self.again
        if again is None or compiled.prepacked is None or not compiled.prepacked.changes:
            return compiled
        self.again = None
        try:
            self.compiled = again()
        except Exception as error:  # the program that is there serves as well
            compiled.records[0].notes.append(f"{STILL_PACKED}: {why(error)}")
        return self.compiled

    def _use_natively(self, ran: tuple[BoundPlan | None, Strides], prepacked: PrepackedWeights | None) -> None:
        """Let native calls run what a call in Python ran for a second time: sizes that are met once stay in Python."""
        again, self._ran = ran == self._ran, ran
        prepared = None if prepacked is None else prepacked.prepared
        if (
            again
            and self._native is not None
            and self._connected is None
            and (prepacked is None or prepared is not None)
        ):
            self._native.use(ran[0], self._backward_plan, ran[1], prepared)

    def _laid_out(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of the forward program on `tensors`, in the strides of eager execution."""
        by_name = dict(zip(self.names, tensors, strict=True)) if self.captured.sized else {}
        return laid_out(self.captured, outputs, sizes_of(self.captured, by_name))

    def differentiated_again(
        self, call: Call, cotangents: Sequence[torch.Tensor | None], needed: Sequence[int]
    ) -> None:
        """Note gradients that are differentiated again: if those of most calls are, other programs run them."""
        self._seconds += 1
        if self._seconds < SECOND_ORDER or 2 * self._seconds < self.runs or self._connected is not None:
            return
        self._connected = None if self.second is None else self.second.connected(call, cotangents, needed)
        self._second_order = self._connected is None
        if self._native is not None:
            library().compiled_calls_end()
        if self._second_order and self.note is not None:
            self.note(f"{DIFFERENTIATED_AGAIN}{f': {self.second.failed}' if self.second is not None else ''}")

    def owners(self, results: Any, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Graph output -> its value in a call of `eager`, for outputs through which gradients flow."""
        sizes = sizes_of(self.captured, dict(zip(self.names, tensors, strict=True)))
        found: dict[int, torch.Tensor] = {}
        for source, leaf in zip(self.captured.outputs, pytree.tree_leaves(results), strict=True):
            if source.kind == "graph" and source.index not in found and leaf.requires_grad:
                found[source.index] = leaf if source.view is None else self._owner(source, leaf, sizes)
        return found

    def _owner(self, source: OutputSource, leaf: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """All of the memory of which a result is a view."""
        graph = self.captured.graph
        assert source.strides is not None
        shape = [evaluate(n, sizes) for n in graph.tensors[graph.outputs[source.index]].shape]
        base = leaf if leaf._base is None else leaf._base
        return base.as_strided(shape, [evaluate(s, sizes) for s in source.strides], 0)

    def backward(self, tensors: Sequence[torch.Tensor], ticket: Ticket | None) -> list[torch.Tensor]:
        """Run the backward program."""
        executable = self.compiled.backward
        assert executable is not None
        if self.cuda_graphs is not None and ticket is not None:
            plan = executable.plan(executable.sizes_of(tensors))
            try:
                return self.cuda_graphs.backward(plan, tensors, ticket)
            except InputMismatch:
                pass
        if self._native is None:
            return run_with_layout(executable, tensors)
        outputs, self._backward_plan = _run_on_plan(executable, tensors)
        return outputs

    def _gradients(
        self,
        arguments: Sequence[Any],
        versions: Sequence[int],
        saved: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None],
        needed: Sequence[int],
    ) -> list[torch.Tensor | None]:
        """The gradients `wanted`, for a native call; the cotangents are those of differentiable results."""
        drawn = dict(zip(self.captured.draws, arguments, strict=False))
        arguments = arguments[len(drawn) :]
        by_name = input_tensors(self.captured, arguments) | drawn
        by_name.update((self.names[i], t) for i, t in zip(self.kept, saved, strict=False) if self.names[i] == SEED)
        tensors = [by_name[name] if name in by_name else torch.empty((), device="cpu") for name in self.names]
        results: list[torch.Tensor | None] = [None] * len(self.captured.graph.outputs)
        for i, cotangent in zip(sorted(self.differentiable), cotangents, strict=True):
            results[i] = cotangent
        call = Call(arguments, tensors, versions)
        found = gradients_of(self, call, lambda: saved, results, [*compress(self.wanted, needed)])
        if self._native is not None and not self._second_order and self._connected is None:
            plan, copied = self._ran
            self._native.use(plan, self._backward_plan, copied)
        return [found[position] for position in self.wanted]

    def __call__(self, *arguments: Any) -> Any:
        return self._call(arguments)

    def _after_draws(self, *arguments: Any) -> Any:
        """A call that a native one leaves to Python: random numbers have been drawn, and come first."""
        count = len(self.captured.draws)
        return self._call(arguments[count:], dict(zip(self.captured.draws, arguments, strict=False)))

    def _call(self, arguments: Sequence[Any], drawn: Mapping[str, torch.Tensor] | None = None) -> Any:
        self._runs += 1
        if self._second_order:
            return self.eager(*arguments)
        if torch.autograd.forward_ad._current_level >= 0:  # `optimize` sees that before; `torch.compile` does not
            return self._by_pytorch(FORWARD_MODE, arguments)
        by_name = input_tensors(self.captured, arguments)
        tensors = list(by_name.values())
        if self.only_in_pytorch and torch.is_grad_enabled() and of_leaves(self, by_name):
            return self._by_pytorch(self.only_in_pytorch, arguments)
        if self.written and self._forbidden(tensors):
            return self.eager(*arguments)  # which raises PyTorch's error
        if self.written and shares_memory(tensors, self.written):  # kernels assume that what they write has no alias
            return self._by_pytorch(SHARED, arguments)
        if not drawn and not self._binds(by_name):
            return self.eager(*arguments)
        if self.captured.random:
            drawn = drawn or random_inputs(self.captured, by_name)
            drawn = {**drawn, SEED: draw_seed()} if SEED in self.captured.graph.inputs else drawn
            tensors = [drawn[n] if n in drawn else by_name[n] for n in self.names]
        if not self.differentiable or not torch.is_grad_enabled():
            results: Sequence[Any] = self.forward(tensors, None)[0]
        else:
            self._disconnect(tensors)
            if self._connected is None:
                results = _Function.apply(self, arguments, *tensors)  # type: ignore[no-untyped-call]
            else:
                results = self._connected(arguments, tensors)
        return results_of(self.captured, results, arguments)

    def _binds(self, by_name: Mapping[str, torch.Tensor]) -> bool:
        """Whether a program runs a call: not one of new sizes, where nearly all are new and PyTorch is faster.

        Where tensors that autograd saves are packed, programs run all calls: a checkpoint that calls this once more
        expects the same tensors.
        """
        executable, new_sizes = self.compiled.forward, self._new_sizes
        if new_sizes is None or self._left is None or executable.timing is not None:
            return True
        values = sizes_of(self.captured, by_name)
        sizes = tuple(values.get(name, -1) for name in executable.program.symbols)
        if -1 in sizes or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return True
        binds = new_sizes.binds(sizes, executable.has_plan(sizes), self.native_runs)
        if new_sizes.slower:
            self._left(NEW_KINDS_SLOWER)
        return binds

    def _by_pytorch(self, reason: str, arguments: Sequence[Any]) -> Any:
        if self.note is not None:
            self.note(reason)
        return self.eager(*arguments)

    def _disconnect(self, tensors: list[torch.Tensor]) -> None:
        """Detach inputs on which no result depends: autograd would run their history, which may be freed by now."""
        for i in self.unwanted:
            if tensors[i].requires_grad:
                tensors[i] = tensors[i].detach()

    def _forbidden(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether PyTorch raises an error if one of these is written."""
        return not torch.is_inference_mode_enabled() and any(tensors[i].is_inference() for i in self.written)


def _run_on_plan(executable: Executable, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], BoundPlan | None]:
    """The outputs, and the plan that ran; None where inputs had to be copied."""
    try:
        plan = executable.plan(executable.sizes_of(inputs))
        return executable(inputs), plan
    except InputMismatch:
        return _run_on_copies(executable, inputs), None


def _counts(captured: Captured, name: str) -> bool:
    """Whether an input may be a counter or a number of the model: later code may change it before the backward pass.

    Autograd keeps it where a derivative reads it, a program also where a result is computed once more. An argument that
    changes is an error, as in PyTorch.
    """
    entry = captured.graph.inputs[name]
    size = entry.tensor.size
    return entry.role is Role.buffer and isinstance(size, int) and size <= COUNTERS


def without_history(value: Any) -> Any:
    """A value; in the place of a tensor without a gradient one of the same memory and version.

    What is written into that tensor later may have a gradient by a call that keeps this one, and so own it: nothing
    would free the two.
    """
    return value.detach() if type(value) is torch.Tensor and not value.requires_grad else value


class _Function(torch.autograd.Function):
    """The forward and backward programs as one autograd node."""

    @staticmethod
    def forward(ctx: Any, graph: CompiledGraph, arguments: Sequence[Any], *tensors: torch.Tensor) -> Any:
        results, saved, ticket = graph.forward(tensors, graph.compiled.results)
        given = [without_history(a) for a in arguments], [without_history(t) for t in tensors]
        ctx.graph, ctx.call = graph, Call(*given, [version_of(t) for t in tensors], ticket)
        kept = (t.clone() if i in graph.copied and not t.requires_grad else t for i in graph.kept for t in [tensors[i]])
        ctx.save_for_backward(*kept, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in graph.differentiable))
        return tuple(results)

    @staticmethod
    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # it may be called where TorchDynamo is at work, by a gradient inside the user's code
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        graph: CompiledGraph = ctx.graph
        if all(c is None for c in cotangents):
            return (None, None, *(None for _ in graph.names))
        if ctx.call is None:
            raise RuntimeError("a second backward pass through a compiled graph; the first needs retain_graph=True")
        needed = [*graph.wanted]
        if torch.is_grad_enabled():
            needed = [i for i in needed if library().backward_needs(i)]
        gradients = gradients_of(graph, ctx.call, lambda: ctx.saved_tensors, cotangents, needed)
        if not torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # as saved tensors are freed
        return (None, None, *gradients)


__all__ = ["CompiledGraph", "draw_seed", "run_with_layout"]
