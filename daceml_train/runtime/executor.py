"""Runs a launch list natively: kernels, matmuls and any operator of PyTorch, on planned and pooled memory.

`native/executor.cpp` does the work; this is its typed interface. A `Plan` is built once and run many times.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import torch

from daceml_train.errors import ExecutionError, Invalid, execution_error
from daceml_train.runtime.native_library import library
from daceml_train.runtime.torch_numbers import DTYPE_NUMBERS, LAYOUTS, MEMORY_FORMATS

_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 2, "baddbmm": 3}
_CONTROL = {"cond": 0, "scan": 1, "while": 2}
_MISMATCH = 2


class InputMismatch(Invalid):
    """Input `index` of a run differs from the layout its plan was specialized for; nothing has run."""

    def __init__(self, message: str, index: int) -> None:
        self.index = index
        super().__init__(message, advice="build a plan for these inputs")


@dataclass(frozen=True, slots=True)
class PlanView:
    """A tensor over a part of a slot, as an argument or a result of an operator."""

    number: int


Items: TypeAlias = "Sequence[PlanView | None] | Sequence[bool] | Sequence[int] | Sequence[float]"
Argument: TypeAlias = (
    "PlanView | bool | int | float | complex | str | torch.device | torch.dtype | torch.layout | torch.memory_format "
    "| Items | None"
)


class Arena:
    """A buffer for planned values, shared by the plans that use it; it grows and never shrinks.

    Plans of one arena exclude each other. Growth preserves the contents, so a plan may read what another one left.
    """

    def __init__(self) -> None:
        native = library()
        self._native, self._handle = native, native.arena_create()
        weakref.finalize(self, native.arena_destroy, self._handle)

    @functools.cached_property
    def inner(self) -> Arena:
        """The arena for bodies of control flow, which run inside programs of this one."""
        return Arena()

    @property
    def capacity(self) -> int:
        """Bytes allocated: 0 until a plan runs or `grow` is called."""
        return int(self._native.arena_capacity(self._handle))

    def grow(self, nbytes: int) -> None:
        """Reserves `nbytes` ahead of the first run."""
        if self._native.arena_grow(self._handle, nbytes) < 0:
            raise ExecutionError(_last_error(self._native), -1)


class Plan:
    """An ordered list of launches over numbered value slots.

    Declare the slots, add launches, `finalize`, then `run` as often as wanted, from any thread. Launches return their
    position. Errors: Invalid for what breaks the contract, InputMismatch before anything ran, ExecutionError with the
    launch's tag while running; after it, the plan can still be run.
    """

    def __init__(self, n_slots: int, arena: Arena | None = None) -> None:
        native = library()
        self.arena = arena or Arena()
        self._native, self._handle = native, native.plan_create(n_slots, self.arena._handle)
        weakref.finalize(self, native.plan_destroy, self._handle)
        self._bodies: list[Plan] = []
        self._launches = self._inputs = 0
        self._input_array = c_void_p * 0

    # Slots

    def arena_slot(self, slot: int, offset: int) -> None:
        """The slot lies in the arena, `offset` bytes from its start."""
        self._checked(self._native.plan_arena_slot(self._handle, slot, offset))

    def input_slot(
        self,
        slot: int,
        index: int,
        dtype: torch.dtype,
        sizes: Sequence[int],
        strides: Sequence[int],
        mutable: bool = False,
    ) -> None:
        """The slot is the memory of input `index`, which every run compares with this layout.

        Every run increments a mutable input's version counter.
        """
        layout = _layout(dtype, sizes, strides)
        self._checked(self._native.plan_input_slot(self._handle, slot, index, *layout, mutable))
        self._inputs = max(self._inputs, index + 1)

    def opaque_slot(
        self, slot: int, index: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]
    ) -> None:
        """The slot is input `index` in a layout that only a library knows; a `call` takes it unchanged.

        Sizes and strides are those of the dense array that it represents; a view of it must cover all of it.
        """
        self._checked(self._native.plan_opaque_slot(self._handle, slot, index, *_layout(dtype, sizes, strides)))
        self._inputs = max(self._inputs, index + 1)

    def fresh_slot(self, slot: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> None:
        """The slot is allocated, uninitialized, just before the first launch that uses it."""
        self._checked(self._native.plan_owned_slot(self._handle, slot, True, *_layout(dtype, sizes, strides)))

    def result_slot(self, slot: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> None:
        """The slot holds what a `call` returns; other strides are converted to these, other sizes are an error."""
        self._checked(self._native.plan_owned_slot(self._handle, slot, False, *_layout(dtype, sizes, strides)))

    def offer(self, slot: int, offset: int) -> None:
        """The call that produces the slot may place it in the arena at `offset`, for the slot's lifetime only.

        An operator must not keep its results, or anything of their size that it allocates, beyond the slot's lifetime.
        """
        self._checked(self._native.plan_offer(self._handle, slot, offset))

    def view(
        self, slot: int, offset: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]
    ) -> PlanView:
        """A tensor over the slot, `offset` bytes from its start; strides in elements.

        It does not keep the memory alive: an operator must not keep the tensor beyond its call.
        """
        return PlanView(
            self._checked(self._native.plan_view(self._handle, slot, offset, *_layout(dtype, sizes, strides)))
        )

    # Launches

    def kernel(
        self, address: int, pointers: Sequence[tuple[int, int]], integers: Sequence[int] = (), *, tag: int = -1
    ) -> int:
        """Calls `void f(void** pointers, const int64_t* integers)`; pointers are (slot, offset in bytes)."""
        slots = _integers([slot for slot, _ in pointers], c_int)
        places = slots, _integers([offset for _, offset in pointers]), len(pointers)
        numbers = _integers(integers), len(integers)
        return self._added(self._native.plan_kernel(self._handle, address, *places, *numbers, tag))

    def mm(self, out: PlanView, a: PlanView, b: PlanView, *, tag: int = -1) -> int:
        """Writes a @ b to `out`."""
        return self._product("mm", out, None, a, b, 0.0, 1.0, tag)

    def bmm(self, out: PlanView, a: PlanView, b: PlanView, *, tag: int = -1) -> int:
        """Writes a[i] @ b[i] to `out[i]`."""
        return self._product("bmm", out, None, a, b, 0.0, 1.0, tag)

    def addmm(
        self,
        out: PlanView,
        bias: PlanView,
        a: PlanView,
        b: PlanView,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        tag: int = -1,
    ) -> int:
        """Writes beta * bias + alpha * (a @ b) to `out`; the bias broadcasts."""
        return self._product("addmm", out, bias, a, b, beta, alpha, tag)

    def baddbmm(
        self,
        out: PlanView,
        bias: PlanView,
        a: PlanView,
        b: PlanView,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        tag: int = -1,
    ) -> int:
        """Writes beta * bias[i] + alpha * (a[i] @ b[i]) to `out[i]`."""
        return self._product("baddbmm", out, bias, a, b, beta, alpha, tag)

    def call(
        self,
        name: str,
        overload: str,
        arguments: Sequence[Argument],
        results: Sequence[int | PlanView | None],
        *,
        tag: int = -1,
    ) -> int:
        """Calls any registered operator, for instance `call("aten::relu", "", [x], [slot])`.

        Arguments are positional; trailing arguments may be omitted. A result goes to a result slot, is
        copied through a view, or (None) is dropped; results that are lists count element by element. A result that
        shares memory with an argument is copied, so that values stay independent.
        """
        self._checked(self._native.call_begin(self._handle, name.encode(), overload.encode()))
        for argument in arguments:
            self._checked(self._add_argument(argument))
        for result in results:
            view = result.number if isinstance(result, PlanView) else -1
            slot = result if isinstance(result, int) else -1
            self._checked(self._native.call_result(self._handle, slot, view))
        return self._added(self._native.call_end(self._handle, tag))

    def control(
        self,
        kind: str,
        bodies: Sequence[Plan],
        condition: PlanView | None,
        states: Sequence[PlanView],
        slices: Sequence[tuple[PlanView, int]],
        shared: Sequence[PlanView],
        results: Sequence[int],
        trips: int,
        reverse: bool,
        *,
        tag: int = -1,
    ) -> int:
        """Runs plans as the bodies of control flow; see `lowering.program.ControlLaunch` for the arguments.

        A slice is the view of the first one and the bytes to the next. Bodies are finalized, have an arena of their
        own, and return dense row-major tensors; `results` are result slots.
        """
        self._bodies += bodies
        handles = (c_void_p * len(bodies))(*[body._handle for body in bodies])
        numbers = [_integers([v.number for v in views], c_int) for views in (states, [v for v, _ in slices], shared)]
        steps = _integers([stride for _, stride in slices])
        return self._added(
            self._native.plan_control(
                self._handle,
                _CONTROL[kind],
                handles,
                len(bodies),
                -1 if condition is None else condition.number,
                numbers[0],
                len(states),
                numbers[1],
                steps,
                len(slices),
                numbers[2],
                len(shared),
                _integers(results, c_int),
                len(results),
                trips,
                reverse,
                tag,
            )
        )

    def release(self, slot: int, *, tag: int = -1) -> int:
        """Drops an owned value after its last use: its memory returns to the pool."""
        return self._added(self._native.plan_release(self._handle, slot, tag))

    def copy(self, to: tuple[int, int], source: tuple[int, int], nbytes: int, *, tag: int = -1) -> int:
        """Copies bytes between (slot, offset) locations that do not overlap."""
        return self.copies([(to, source, nbytes)], tag=tag)

    def copies(self, places: Sequence[tuple[tuple[int, int], tuple[int, int], int]], *, tag: int = -1) -> int:
        """Copies that do not depend on each other: (target, source, bytes) each, as in `copy`."""
        slots = [to for (to, _), _, _ in places] + [source for _, (source, _), _ in places]
        numbers = [at for (_, at), _, _ in places] + [at for _, (_, at), _ in places] + [size for *_, size in places]
        arrays = _integers(slots, c_int), _integers(numbers, c_int64)
        return self._added(self._native.plan_copies(self._handle, *arrays, len(places), tag))

    def finalize(self, arena_bytes: int, outputs: Sequence[int]) -> None:
        """Closes the list. Raises Invalid if a value is used before it exists, after its release, or leaves the arena.

        `outputs` are owned slots; each run hands their tensors over.
        """
        self._checked(self._native.plan_finalize(self._handle, arena_bytes, _integers(outputs, c_int), len(outputs)))
        self._input_array = c_void_p * self._inputs

    def threads(self, most: Sequence[int]) -> None:
        """The most threads per launch; 0 for as many as the caller has, -1 for those of the launch before it.

        An empty list means all threads for all launches. Kernels' results do not depend on it; those of a library may.
        """
        self._checked(self._native.plan_threads(self._handle, _integers(most, c_int), len(most)))

    def lanes(self, segments: Sequence[Sequence[Sequence[int]]], waits: Sequence[Sequence[int]]) -> None:
        """Runs launches side by side: per segment, per lane, positions in the list; per launch, those it waits for.

        Lanes have one thread each; the launches of a segment of one lane have threads of their own. No segments: the
        launches run in order. Launches of several lanes must not share a `PlanView`. Raises Invalid for an order that
        leaves a launch out or could wait for ever; that no two launches at once touch the same memory, unless both only
        read it, is the caller's to know.
        """
        numbers = [len(segments)]
        for segment in segments:
            numbers.append(len(segment))
            for lane in segment:
                numbers += [len(lane), *lane]
        for each in waits if segments else [()] * self._launches:
            numbers += [len(each), *each]
        if segments and len(waits) != self._launches:
            raise Invalid(f"the plan has {self._launches} launches, given waits for {len(waits)}")
        self._checked(self._native.plan_lanes(self._handle, _integers(numbers, c_int), self._launches))

    # Running

    def run(self, inputs: Sequence[torch.Tensor], profile: bool = False) -> list[torch.Tensor]:
        """Runs all launches on these tensors and returns the outputs, which belong to the caller."""
        if len(inputs) != self._inputs:
            raise Invalid(f"the plan takes {self._inputs} inputs, given {len(inputs)}")
        return self.run_addresses(self._input_array(*[tensor._cdata for tensor in inputs]), profile=profile)

    def run_addresses(self, inputs: ctypes.Array[c_void_p], profile: bool = False) -> list[torch.Tensor]:
        """`run` on an array of `tensor._cdata`, which the caller owns; the tensors must stay alive during the run."""
        outputs = self._native.plan_call(self._handle, inputs, len(inputs), profile)
        if outputs.__class__ is int:
            self.fail(outputs)
        return cast("list[torch.Tensor]", outputs)

    def seconds(self) -> list[float]:
        """Seconds per launch in the last run with `profile=True`, in the order of the list."""
        measured = (c_double * self._launches)()
        self._checked(self._native.plan_seconds(self._handle, measured, None, self._launches))
        return list(measured)

    def spans(self) -> list[tuple[float, float]]:
        """Per launch the seconds from the start of that run to its begin, and to its end."""
        measured, begun = (c_double * self._launches)(), (c_double * self._launches)()
        self._checked(self._native.plan_seconds(self._handle, measured, begun, self._launches))
        return [(start, start + spent) for start, spent in zip(begun, measured, strict=True)]

    def _product(
        self,
        kind: str,
        out: PlanView,
        bias: PlanView | None,
        a: PlanView,
        b: PlanView,
        beta: float,
        alpha: float,
        tag: int,
    ) -> int:
        bias_number = -1 if bias is None else bias.number
        return self._added(
            self._native.plan_product(
                self._handle, _PRODUCTS[kind], out.number, bias_number, a.number, b.number, beta, alpha, tag
            )
        )

    def _add_argument(self, value: Argument) -> int:
        native, handle = self._native, self._handle
        added: Any
        if value is None:
            added = native.call_none(handle)
        elif isinstance(value, PlanView):
            added = native.call_tensor(handle, value.number)
        elif isinstance(value, bool):  # before int, its base class
            added = native.call_boolean(handle, value)
        elif isinstance(value, int):
            added = native.call_integer(handle, value)
        elif isinstance(value, float):
            added = native.call_double(handle, value)
        elif isinstance(value, complex):
            added = native.call_complex(handle, value.real, value.imag)
        elif isinstance(value, str):
            added = native.call_string(handle, value.encode())
        elif isinstance(value, torch.device):
            added = native.call_device(handle, str(value).encode())
        elif isinstance(value, torch.dtype):
            added = native.call_integer(handle, DTYPE_NUMBERS[value])
        elif isinstance(value, torch.memory_format):
            added = native.call_integer(handle, MEMORY_FORMATS[value])
        elif isinstance(value, torch.layout):
            added = native.call_integer(handle, LAYOUTS[value])
        else:
            added = self._add_list(value)
        return int(added)

    def _add_list(self, items: Items) -> int:
        native, handle, count = self._native, self._handle, len(items)
        kinds = {type(item) for item in items}
        added: Any
        if kinds & {PlanView, type(None)}:
            numbers = [item.number if isinstance(item, PlanView) else -1 for item in items]
            added = native.call_tensors(handle, _integers(numbers, c_int), count)
        elif kinds == {bool}:
            added = native.call_booleans(handle, (c_int * count)(*cast("Sequence[int]", items)), count)
        elif float in kinds:
            added = native.call_doubles(handle, (c_double * count)(*cast("Sequence[float]", items)), count)
        else:
            added = native.call_integers(handle, _integers(cast("Sequence[int]", items)), count)
        return int(added)

    def _checked(self, number: int) -> int:
        if number < 0:
            raise Invalid(_last_error(self._native))
        return number

    def _added(self, position: int) -> int:
        self._launches = self._checked(position) + 1
        return position

    def fail(self, status: int) -> NoReturn:
        """Raise the error of the last run in this thread, which ended with this status."""
        message, number = _last_error(self._native), self._native.executor_error_number()
        if status == _MISMATCH:
            raise InputMismatch(message, number)
        raised = self._native.executor_error_raised()
        if type(raised) is RuntimeError and message.startswith("linalg."):  # of a check of ours in place of PyTorch's
            raised = torch.linalg.LinAlgError(message)  # type: ignore[attr-defined]
        raise execution_error(message, number, raised=raised)


def _layout(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, Any, Any, int]:
    if len(sizes) != len(strides):
        raise Invalid(f"{len(sizes)} sizes but {len(strides)} strides")
    return DTYPE_NUMBERS[dtype], _integers(sizes), _integers(strides), len(sizes)


def _integers(items: Sequence[int], kind: type[c_int] | type[c_int64] = c_int64) -> Any:
    return _array_type(kind, len(items))(*items)


@functools.lru_cache(maxsize=1024)
def _array_type(kind: type[c_int] | type[c_int64], count: int) -> Any:
    return kind * count


def _last_error(native: ctypes.CDLL) -> str:
    return cast(bytes, native.executor_error_message()).decode(errors="replace")
