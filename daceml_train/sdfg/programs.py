"""Functions written in DaCe: what they take and return, compiled for the CPU, and their derivatives by `dace.autodiff`.

Arguments that a program only reads are operands. What it returns, and arguments that it only writes, are results. The
derivative is a program of its own: the SDFG with the sum of all results times their cotangents after it, which
`dace.autodiff` differentiates in reverse mode.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sympy

from daceml_train.errors import Invalid, Unsupported
from daceml_train.sdfg.convert import dace
from daceml_train.storage.folders import cache_folder

RESULT = "result_"
"""How results that a program returns are called, in place of DaCe's `__return`."""
_SEED, _OBJECTIVE, _GRADIENT = "cotangent_", "objective", "gradient_"


@dataclass(frozen=True)
class Argument:
    """An array or number that a program takes or makes: its sizes are over the program's symbols; None for a number."""

    name: str
    shape: tuple[Any, ...] | None
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through it."""
        return self.shape is not None and self.dtype in ("float32", "float64")


@dataclass
class DaceFunction:
    """A program as a function from operands to new results."""

    name: str
    sdfg: Any
    operands: tuple[Argument, ...]
    results: tuple[Argument, ...]
    scratch: Mapping[str, float] = field(default_factory=dict)
    """Further arrays that the SDFG wants, and what they are filled with."""
    _compiled: Any = None
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def key(self) -> str:
        """A hash of what is computed."""
        text = f"{self.sdfg.hash_sdfg()} {self.operands} {self.results} {dace.__version__}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def sizes(self, shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The values of the program's symbols for operands of these shapes. Raises `Invalid` where they do not fit."""
        arrays = [a for a in self.operands if a.shape is not None]
        found: dict[str, Any] = {}
        for argument, shape in zip(arrays, shapes, strict=True):
            expected = argument.shape or ()
            if len(shape) != len(expected) and not (expected == (1,) and len(shape) == 0):
                raise Invalid(f"{argument.name} of {self.name} has {len(expected)} dimensions, given {list(shape)}")
            for size, value in zip(expected, shape, strict=False):
                if isinstance(size, sympy.Symbol):
                    found.setdefault(str(size), value)
        for argument, shape in zip(arrays, shapes, strict=True):
            for size, value in zip(argument.shape or (), shape, strict=False):
                if evaluated(size, found) != value:
                    expected_shape = ", ".join(map(str, argument.shape or ()))
                    known = ", ".join(f"{k}={v}" for k, v in found.items())
                    raise Invalid(
                        f"{argument.name} of {self.name} is [{expected_shape}], given {list(shape)}"
                        + (f" where {known}" if known else "")
                    )
        return found

    def __call__(self, *given: Any) -> list[Any]:
        """Run on NumPy arrays and numbers; new arrays."""
        shapes = [v.shape for v, a in zip(given, self.operands, strict=True) if a.shape is not None]
        sizes = self.sizes(shapes)
        arrays = {a.name: v for a, v in zip(self.operands, given, strict=True)}
        results = [np.zeros([evaluated(n, sizes) for n in a.shape or ()], a.dtype) for a in self.results]
        arrays |= {a.name: v for a, v in zip(self.results, results, strict=True)}
        for name, value in self.scratch.items():
            held = self.sdfg.arrays[name]
            arrays[name] = np.full([evaluated(n, sizes) for n in held.shape], value, held.dtype.type)
        with self._lock:
            if self._compiled is None:
                self._compiled = _compile(self)
            wanted = self.sdfg.arglist()
            arguments = {**arrays, **{k: v for k, v in sizes.items() if k in wanted}}
            with dace.config.set_temporary("compiler", "allow_view_arguments", value=True):  # they are dense
                self._compiled(**{k: v for k, v in arguments.items() if k in wanted})
        return results

    def derivative(self) -> DaceFunction:
        """From the operands and a cotangent per result to a gradient per floating-point array among the operands.

        Raises `Unsupported` for what `dace.autodiff` cannot differentiate.
        """
        wrt = [a for a in self.operands if a.is_float]
        sdfg = copy.deepcopy(self.sdfg)
        sdfg.name = f"{self.sdfg.name}_backward"
        try:
            sdfg.apply_transformations_repeated(dace.transformation.dataflow.TaskletFusion)
            _read_directly(sdfg)
            _between_tasklets(sdfg)
            seeds = _append_objective(sdfg, [a for a in self.results if a.is_float])
            _autodiff().add_backward_pass(sdfg, outputs=[_OBJECTIVE], inputs=[a.name for a in wrt], simplify=False)
        except Exception as error:  # whatever DaCe raises, assertions among them
            why = str(error).strip().split("\n")[0] or "an assertion of DaCe's"
            raise Unsupported(
                f"dace.autodiff does not differentiate {self.name}: {type(error).__name__}, {why}",
                advice="dace_operator(program, backward=another program) takes a derivative of yours",
            ) from error
        gradients = []
        for argument in wrt:
            if f"{_GRADIENT}{argument.name}" not in sdfg.arrays:
                raise Unsupported(f"dace.autodiff finds no gradient of {self.name} by {argument.name}")
            gradients.append(Argument(f"{_GRADIENT}{argument.name}", argument.shape, argument.dtype))
        scratch = {a.name: 0.0 for a in self.results} | {_OBJECTIVE: 0.0}
        scratch[f"{_GRADIENT}{_OBJECTIVE}"] = 1.0
        scratch = {name: value for name, value in scratch.items() if name in sdfg.arrays}
        return DaceFunction(f"the derivative of {self.name}", sdfg, (*self.operands, *seeds), tuple(gradients), scratch)


def _autodiff() -> Any:
    import dace.autodiff as autodiff  # on demand: it imports a lot

    return autodiff


def function_of(program: Any, results: Sequence[str] = ()) -> DaceFunction:
    """The function that a program or an SDFG is. `results` names arguments whose first values do not matter.

    Raises `Invalid` for anything else, `Unsupported` for a program that is no function of arrays.
    """
    if isinstance(program, dace.SDFG):
        sdfg = copy.deepcopy(program)
    elif isinstance(program, dace.frontend.python.parser.DaceProgram):
        sdfg = copy.deepcopy(program.to_sdfg(simplify=True))
    else:
        raise Invalid(f"dace_operator takes a function under @dace.program or an SDFG, given {type(program).__name__}")
    name = sdfg.label if isinstance(program, dace.SDFG) else str(program.f.__name__)
    for position, returned in enumerate(n for n in list(sdfg.arrays) if n.startswith("__return")):
        sdfg.replace(returned, f"{RESULT}{position}")
    reads, writes = sdfg.read_and_write_sets()
    operands, outputs = [], []
    order = list(getattr(program, "argnames", None) or sdfg.arg_names)
    held = {n: d for n, d in sdfg.arglist().items() if n not in sdfg.free_symbols}
    for key in sorted(held, key=lambda n: (order.index(n) if n in order else len(order), n)):
        argument = _argument(name, key, held[key])
        if key.startswith("__g_"):
            raise Unsupported(f"{name} reads {key.removeprefix('__g_')} of its surroundings", advice="pass it to it")
        if key not in writes:
            operands.append(argument)
        elif key in reads and key not in results and not key.startswith(RESULT):
            raise Unsupported(
                f"{name} reads and writes its argument {key}",
                advice=f"return it; or pass results=({key!r},) if {name} takes nothing from it: it is zeros then",
            )
        else:
            outputs.append(argument)
    if unknown := set(results) - {a.name for a in outputs}:
        raise Invalid(f"{name} writes no argument called {', '.join(sorted(unknown))}")
    if not outputs:
        raise Unsupported(f"{name} returns nothing and writes none of its arguments")
    known = {str(n) for a in operands for n in a.shape or () if isinstance(n, sympy.Symbol)}
    if unknown := {str(s) for s in sdfg.free_symbols} - known:
        raise Unsupported(
            f"{name} is over {', '.join(sorted(unknown))}, which no operand has as a size of its own",
            advice="pass an array with that size",
        )
    return DaceFunction(name, sdfg, tuple(operands), tuple(outputs))


def _argument(program: str, name: str, held: Any) -> Argument:
    if type(held) not in (dace.data.Array, dace.data.Scalar):
        raise Unsupported(f"{name} of {program} is a {type(held).__name__}, operators take arrays and numbers")
    dtype = np.dtype(held.dtype.type).name
    if isinstance(held, dace.data.Scalar):
        return Argument(name, None, dtype)
    if list(held.strides) != list(dace.data.Array(held.dtype, held.shape).strides):
        raise Unsupported(f"{name} of {program} has strides of its own, operators take dense arrays")
    return Argument(name, tuple(held.shape), dtype)


def evaluated(size: Any, sizes: Mapping[str, Any]) -> Any:
    """A size with the values of its symbols, which may be PyTorch's."""
    if isinstance(size, int):
        return size
    names = sorted(size.free_symbols, key=str)
    if len(names) == 1 and size == names[0]:
        return sizes[str(size)]
    value = sympy.lambdify(names, size)(*(sizes[str(n)] for n in names)) if names else int(size)
    return value


# ---- derivatives ----------------------------------------------------------------------------------------------------
def _read_directly(sdfg: Any) -> None:
    """Let tasklets in a map read elements of arrays without a number between: `dace.autodiff` forwards arrays only."""
    for inner, state in ((s, state) for s in sdfg.all_sdfgs_recursive() for state in s.states()):
        for node in list(state.data_nodes()):
            held, read, readers = inner.arrays[node.data], state.in_edges(node), state.out_edges(node)
            one = held.transient and held.total_size == 1 and len(read) == 1
            if not one or not isinstance(read[0].src, dace.nodes.MapEntry):
                continue
            if all(isinstance(edge.dst, dace.nodes.Tasklet) for edge in readers):
                for edge in readers:
                    memlet = copy.deepcopy(read[0].data)
                    memlet.other_subset = None
                    state.add_edge(read[0].src, read[0].src_conn, edge.dst, edge.dst_conn, memlet)
                state.remove_node(node)


def _between_tasklets(sdfg: Any) -> None:
    """Put a number between tasklets that follow each other at once: `dace.autodiff` forwards arrays only."""
    for inner, state in ((s, state) for s in sdfg.all_sdfgs_recursive() for state in s.states()):
        for edge in list(state.edges()):
            ends = (edge.src, edge.dst)
            if not all(isinstance(end, dace.nodes.Tasklet) for end in ends) or edge.data.is_empty():
                continue
            kind = edge.src.out_connectors[edge.src_conn] or edge.dst.in_connectors[edge.dst_conn]
            if kind is None or kind.type is None:
                raise Unsupported(f"a value between {edge.src.label} and {edge.dst.label}, whose type is not known")
            name, _ = inner.add_scalar("between", kind, transient=True, find_new_name=True)
            access = state.add_access(name)
            state.add_edge(edge.src, edge.src_conn, access, None, dace.Memlet(f"{name}[0]"))
            state.add_edge(access, None, edge.dst, edge.dst_conn, dace.Memlet(f"{name}[0]"))
            state.remove_edge(edge)


def _append_objective(sdfg: Any, results: Sequence[Argument]) -> list[Argument]:
    """Append the sum of all results times their cotangents, which are further inputs."""
    if not results:
        raise Unsupported("no result is of a floating-point type")
    seeds, parts = [], []
    (last,) = [block for block in sdfg.nodes() if sdfg.out_degree(block) == 0]
    kind = sdfg.arrays[results[0].name].dtype
    sdfg.add_array(_OBJECTIVE, [1], kind)
    for position, result in enumerate(results):
        held = sdfg.arrays[result.name]
        if held.dtype != kind:
            raise Unsupported("results of several types")
        seed, weighted, part = (f"{prefix}{position}" for prefix in (_SEED, "weighted_", "part_"))
        sdfg.add_array(seed, held.shape, held.dtype)
        sdfg.add_transient(weighted, held.shape, held.dtype)
        sdfg.add_transient(part, [1], held.dtype)
        parts.append(part)
        state = last = sdfg.add_state_after(last, f"objective_{position}")
        ranges = {f"__i{i}": f"0:{size}" for i, size in enumerate(held.shape)}
        at = ", ".join(ranges)
        memlets = {"__a": dace.Memlet(f"{result.name}[{at}]"), "__s": dace.Memlet(f"{seed}[{at}]")}
        outputs = {"__r": dace.Memlet(f"{weighted}[{at}]")}
        state.add_mapped_tasklet(weighted, ranges, memlets, "__r = __a * __s", outputs, external_edges=True)
        (product,) = [n for n in state.data_nodes() if n.data == weighted]
        total = state.add_reduce("lambda a, b: a + b", None, 0)
        state.add_edge(product, None, total, None, dace.Memlet.from_array(weighted, sdfg.arrays[weighted]))
        state.add_edge(total, None, state.add_access(part), None, dace.Memlet(f"{part}[0]"))
        seeds.append(Argument(seed, result.shape, result.dtype))
    state = sdfg.add_state_after(last, _OBJECTIVE)
    connectors = [f"__p{position}" for position in range(len(parts))]
    code = f"__o = {' + '.join(connectors)}"
    total = state.add_tasklet(_OBJECTIVE, dict.fromkeys(connectors), {"__o": None}, code)
    for part, connector in zip(parts, connectors, strict=True):
        state.add_edge(state.add_access(part), None, total, connector, dace.Memlet(f"{part}[0]"))
    state.add_edge(total, "__o", state.add_access(_OBJECTIVE), None, dace.Memlet(f"{_OBJECTIVE}[0]"))
    return seeds


def _compile(function: DaceFunction) -> Any:
    """The program, compiled into the cache folder, or from there."""
    folder = Path(cache_folder()) / "dace" / function.key
    sdfg = function.sdfg
    sdfg.name = f"{sdfg.label}_{function.key}" if not sdfg.label.endswith(function.key) else sdfg.label
    sdfg.build_folder = str(folder)
    with dace.config.set_temporary("compiler", "use_cache", value=True):
        return sdfg.compile()
