"""What a user may look at while a model compiles: the graph after each pass, the SDFGs, the generated code."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import show
from daceml_train.lowering.program import Program


@dataclass
class Dump:
    """Writes into `folder`: `001_forward_fusion_fuse_elementwise.txt` and so on in the order of the passes, then per
    program an SDFG of its operators (`forward.sdfg`, for DaCe's viewers) and the C++ of each distinct kernel.
    """

    folder: Path
    count: int = field(default=0, init=False)

    @staticmethod
    def of(given: Dump | Path | str | None) -> Dump | None:
        """The dump into a folder. Raises `Invalid` where no file can be written there."""
        if given is None or isinstance(given, Dump):
            return given
        if not isinstance(given, str | os.PathLike):
            raise Invalid(f"dump is a folder's path or a Dump, given {given!r}")
        return Dump(writable(Path(given).expanduser().absolute()))

    def graph(self, name: str, level: str, transformation: str, graph: Graph) -> None:
        """Write a graph's text after a pass."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count += 1
        path = self.folder / f"{self.count:03}_{name}_{level}_{transformation}.txt"
        path.write_text(show(graph))

    def program(self, name: str, graph: Graph, program: Program) -> None:
        """Write what was lowered, as an SDFG of operators, and its kernels."""
        from daceml_train.sdfg.convert import to_sdfg  # brings DaCe in, which nobody else needs on a warm start

        label = name.replace(" ", "_")
        self.folder.mkdir(parents=True, exist_ok=True)
        to_sdfg(graph).save(str(self.folder / f"{label}.sdfg"))
        for number, code in enumerate(code for each in program.all for code in each.codes):
            (self.folder / f"{label}_kernel{number:03}_{code.key}.cpp").write_text(code.source)


def writable(folder: Path, origin: str = "") -> Path:
    """The folder, which is made if need be. Raises `Invalid` where no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise Invalid(f"nothing can be dumped into {folder}{origin}: {error.strerror or error}") from None
