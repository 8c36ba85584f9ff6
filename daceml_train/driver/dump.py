"""What a user may look at while a model compiles: the graph after each pass, the SDFGs, the generated code."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import show
from daceml_train.lowering.cost import Cost
from daceml_train.lowering.listing import listing
from daceml_train.lowering.program import KernelLaunch, Program
from daceml_train.storage.folders import DUMP, writable_folder


@dataclass
class Dump:
    """Writes into `folder`: `001_training_step_fusion_fuse_elementwise.txt` and so on in the order of the passes, then
    per program an SDFG of its operators (`training_step.sdfg`, for DaCe's viewers), the plan of buffers and launches
    (`training_step.plan`), and the source of each distinct kernel, whose arrays are named after the graph's values.

    A graph that has no form as an SDFG, since DaCe refuses the name of a size, has a text file instead, which says so.

    Several programs of one name are numbered: `forward`, `forward_2`.
    """

    folder: Path
    count: int = field(default=0, init=False, compare=False)
    programs: Counter[str] = field(default_factory=Counter, init=False, compare=False, repr=False)

    @staticmethod
    def of(given: Dump | Path | str | None) -> Dump | None:
        """The dump into a folder, into `$DACEML_TRAIN_DUMP` for None, if that is set.

        Raises `Invalid` where no file can be written there.
        """
        if isinstance(given, Dump):
            writable(given.folder)
            return given
        if given is None:
            named = os.environ.get(DUMP)
            return _shared(writable(_path(named), f" (from ${DUMP})")) if named else None
        if not isinstance(given, str | os.PathLike):
            raise Invalid(f"dump is a folder's path or a Dump, given {given!r}")
        return Dump(writable(_path(given)))

    def graph(self, name: str, level: str, transformation: str, graph: Graph) -> None:
        """Write a graph's text after a pass."""
        self.count += 1
        path = self.folder / f"{self.count:03}_{_file(name)}_{level}_{transformation}.txt"
        path.write_text(show(graph), encoding="utf-8")

    def program(self, name: str, graph: Graph, program: Program, launches: Sequence[Cost]) -> None:
        """Write what was lowered, as an SDFG of operators, the plan, and the kernels."""
        from daceml_train.sdfg.convert import to_sdfg  # brings DaCe in, which nobody else needs on a warm start

        label = _file(name)
        self.programs[label] += 1
        if self.programs[label] > 1:
            label = f"{label}_{self.programs[label]}"
        try:
            to_sdfg(graph).save(str(self.folder / f"{label}.sdfg"))
        except Invalid as error:
            (self.folder / f"{label}.sdfg.txt").write_text(f"no SDFG: {error}\n", encoding="utf-8")
        (self.folder / f"{label}.plan").write_text(listing(program, launches), encoding="utf-8")
        distinct = {code.key: code for each in program.all for code in each.codes}
        heads, values = _heads(graph, program, launches), _values(graph, program)
        for number, code in enumerate(distinct.values()):
            path = self.folder / f"{label}_kernel{number:03}_{code.key}.cpp"
            text = _with_names(code.source, values.get(code.key, ()))
            path.write_text(heads.get(code.key, "") + text, encoding="utf-8")


def _heads(graph: Graph, program: Program, launches: Sequence[Cost]) -> dict[str, str]:
    """Per kernel's key a comment: each place where the program uses it, and the graph's names for what it reads and
    writes there, in the order of the kernel's pointers. The source itself knows no place, since places share it.
    """
    heads: dict[str, str] = {}
    for launch, node, cost in zip(program.launches, program.nodes, launches, strict=True):
        if isinstance(launch, KernelLaunch):
            where = f" (at {cost.source})" if cost.source else ""
            head = f"// {cost.name or 'operand'}{where}\n"
            if node >= 0 and cost.name:
                result, read = (
                    ", ".join(f"%{n}" for n in ns) for ns in (graph.nodes[node].outputs, graph.nodes[node].inputs)
                )
                head += f"//   {result} = ({read})\n"
            key = program.codes[launch.code].key
            heads[key] = heads.get(key, "") + head
    return heads


def _values(graph: Graph, program: Program) -> dict[str, list[str]]:
    """Per kernel's key the graph's values at its pointers, where the program first uses it."""
    values: dict[str, list[str]] = {}
    for launch, position in zip(program.launches, program.nodes, strict=True):
        if isinstance(launch, KernelLaunch) and position >= 0:
            node = graph.nodes[position]
            over = {result for result, _ in getattr(node.op, "updates", ())}
            results = [name for i, name in enumerate(node.outputs) if i not in over]
            values.setdefault(program.codes[launch.code].key, [*node.inputs, *results])
    return values


def _with_names(source: str, values: Sequence[str]) -> str:
    """Generated C++ whose arrays are named after the graph's values: `x1` becomes `x1_model_fc_weight`."""
    name = r"\b([xy]\d+)\b"
    signature = re.search(r"^void __program_\w+_internal\((.*)\)$", source, re.MULTILINE)
    call = re.search(r"^ +__program_\w+_internal\((.*)\);$", source, re.MULTILINE)
    if signature and call:
        given = zip(signature[1].split(", "), re.split(r", (?![^()]*\))", call[1]), strict=True)
        pairs = [(re.search(name, a), re.search(r"pointers\[(\d+)\]", b)) for a, b in given]
        positions = {a[1]: int(b[1]) for a, b in pairs if a and b}
    else:  # a CUDA kernel's entry assigns the pointers
        assigned = re.findall(rf"{name} = \([\w ]+\*\)pointers\[(\d+)\]", source)
        positions = {array: int(position) for array, position in assigned}
    names = {a: f"{a}_{_file(values[i])}" for a, i in positions.items() if i < len(values)}
    return re.sub(name, lambda match: names.get(match[1], match[1]), source)


def _file(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def _path(given: str | os.PathLike[str]) -> Path:
    return Path(given).expanduser().absolute()


@functools.cache
def _shared(folder: Path) -> Dump:
    """The one dump of a process into the folder of the environment, so that several models are numbered through."""
    return Dump(folder)


def writable(folder: Path, origin: str = "") -> Path:
    """The folder, which is made if need be. Raises `Invalid` where no file can be written there."""
    try:
        return writable_folder(folder)
    except OSError as error:
        raise Invalid(f"nothing can be dumped into {folder}{origin}: {error.strerror or error}") from None
