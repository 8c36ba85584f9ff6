"""Records of compilation: passes, launches, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from daceml_train.driver.rematerialized import Rematerialized
from daceml_train.lowering.cost import Cost
from daceml_train.passes.pipeline import PassRecord
from daceml_train.runtime.executable import Executable
from daceml_train.storage.storable import storable
from daceml_train.tensor import Dim


@storable
@dataclass
class Record:
    """What is known of one compiled program, for the report."""

    name: str
    bytes_captured: Dim = 0
    """Bytes with one kernel or call per operator, as an eager framework runs them, gradients and update included."""
    flops: Dim = 0
    passes: list[PassRecord] = field(default_factory=list)
    kernels: int = 0
    distinct_kernels: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    """(operator, the user's line) of operators that run in ATen for lack of a lowering."""
    constant_sizes: list[str] = field(default_factory=list)
    """Which sizes became constants of the program although others were asked for, and why."""
    notes: list[str] = field(default_factory=list)
    """What else changes how calls run, and why."""
    needs_python: str = ""
    """Why each call runs through Python; empty where later calls do not, and on a GPU."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per stage of compilation."""
    warm: bool = False
    """Whether the program came from the cache."""
    costs: list[Cost] = field(default_factory=list)
    """The kind of each launch of the program, and the bytes that it moves."""
    left_out: list[str] = field(default_factory=list)
    """Names of the pipeline's passes that are not for the device."""
    recomputed: list[Rematerialized] = field(default_factory=list)
    """Arrays that are rematerialized instead of being kept."""
    executable: Executable | None = field(default=None, repr=False, compare=False)
    """The executable in this process, once the program is linked."""
