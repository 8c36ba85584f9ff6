"""Geometry: how the rows and lanes of a kernel are shared out over the threads of a block.

    thread    owns fragments: `width` neighbouring lanes each, `fragments` of them at a time
    team      `team` threads that share a row: part of a warp, a warp, or the whole block
    block     `threads` threads: one or more teams, each with rows of its own

Every lane map of a kernel gives the same lanes to the same thread, so what a thread stores for itself, it finds again
without a barrier. Barriers stand only in reductions over a team or a block, and where a square is turned.
"""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.codegen.loops import Loops, hint
from daceml_train.codegen.phases import Phases
from daceml_train.tensor import product, same

REGISTERS = 48
"""Values per thread that are kept in registers at most, beside those of the computation itself."""
VECTOR = 16
"""Bytes of the widest access."""
MOST_THREADS = 1024


@dataclass(frozen=True)
class Geometry:
    """The shape of a block. `capacity` lanes are in the hands of a team at one time.

    `resident`: a team, or block, sees only lanes that it can hold at one time; they stay in registers. `full`: there
    are exactly `capacity` of them, always. `ragged`: the number of lanes need not be a multiple of `width`.
    """

    threads: int
    team: int
    width: int
    fragments: int = 1
    resident: bool = True
    tiled: bool = False
    """Whether blocks share out the lanes, too."""
    full: bool = False
    ragged: bool = False

    @property
    def capacity(self) -> int:
        """Lanes that a team holds at one time."""
        return self.team * self.width * self.fragments

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.threads // self.team


def choose(loops: Loops, phases: Phases) -> Geometry:
    """The geometry of a kernel, from its sizes: symbols count as 64 where that does no harm."""
    lanes = product(a.size for a in loops.lane_axes)
    width, ragged = _width(loops)
    if loops.mode == "flat":
        if loops.squares:
            return Geometry(256, 32, 1)
        types = [a.dtype for a in loops.reads] + [a.dtype for a in loops.results]
        arrays = sum(max(2, dtype.bytes) / 4 for dtype in types)
        while width > 1 and arrays * width > REGISTERS:  # all fragments of a thread are in registers at one time
            width //= 2
        ragged = ragged and width > 1
        return Geometry(256, 1, width, full=True, ragged=ragged)
    if loops.mode == "tiles":
        return Geometry(128, 128, width, full=isinstance(lanes, int) and lanes % (128 * width) == 0, ragged=ragged)
    fragments = -(-int(lanes) // width) if isinstance(lanes, int) else 0
    if not any(loops.kind(leaf) == "row" for leaf in loops.leaves.values()) and not any(
        rows.kept for rows in phases.rows if rows
    ):
        if 0 < fragments <= 32:
            team = _power(fragments)
            return Geometry(256, team, width, full=lanes == team * width, ragged=ragged)
        full = isinstance(lanes, int) and lanes % (32 * width) == 0
        return Geometry(256, 32, width, tiled=True, full=full, ragged=ragged)
    held = max(1.0, _held(loops, phases))
    most = min(8, int(REGISTERS / (held * width)))
    if fragments and most and fragments <= 32 * most:
        team = min(32, _power(fragments))
    elif fragments and most and _power(-(-fragments // most)) < MOST_THREADS:
        team = _power(-(-fragments // most))
    else:
        team = min(MOST_THREADS // 2, max(64, _power(int(hint(lanes)) // (4 * width) or 256)))
        team = team if isinstance(lanes, int) else 256
        return Geometry(team, team, width, 2, resident=False, ragged=ragged)
    count = -(-fragments // team)
    threads = 128 if team <= 32 else team  # more than a warp: the block, for its barriers
    return Geometry(threads, team, width, count, full=lanes == team * width * count, ragged=ragged)


def _power(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def _width(loops: Loops) -> tuple[int, bool]:
    """Lanes per fragment, and whether their number may leave a rest.

    16 bytes of the narrowest elements, where sizes and strides that are known allow whole fragments; the others are
    checked at each launch.
    """
    if not loops.lane_axes:
        return 1, False
    inner, size = loops.innermost[loops.lane_axes[-1].name], loops.lane_axes[-1].size
    types = [array.dtype for array in loops.reads] + [array.dtype for array in loops.results]
    arrays = zip(types, loops.memory + loops.stores, strict=True)
    unit = [(dtype.bytes, strides) for dtype, strides in arrays if same(strides.get(inner, 0), 1)]
    if not unit or (len(loops.lane_axes) > 1 and not isinstance(size, int)):
        return 1, False
    narrow = [b for b, _ in unit if b > 1] or [1]
    width = min(8, VECTOR // min(narrow)) if narrow != [1] else VECTOR
    inner_axes = set(loops.innermost.values())
    numbers = [s for _, strides in unit for a, s in strides.items() if a in inner_axes and a != inner]
    if loops.row_axes or len(loops.lane_axes) > 1:
        numbers.append(size)
    while width > 1 and any(isinstance(n, int) and n % width for n in numbers):
        width //= 2
    return width, width > 1 and not (isinstance(size, int) and size % width == 0)


def _held(loops: Loops, phases: Phases) -> float:
    """Registers per lane for what a thread keeps, in the phase that keeps most."""
    most = 0.0
    for rows in phases.rows:
        if rows is None:
            continue
        seen = [v for stage in rows.stages for v in stage.loads]
        again = {v for v in seen if seen.count(v) > 1 and loops.leaves[v].op is None}
        sums = [n for stage in rows.stages for n in stage.columns]
        others = max(sum(loops.leaves[v].op is None and v not in again for v in stage.loads) for stage in rows.stages)
        loads = sum(max(2, loops.leaves[v].dtype.bytes) / 4 for v in again)
        kept = sum(max(4, loops.leaves[v].dtype.bytes) / 4 for v in [*rows.kept, *sums])
        most = max(most, loads + kept + others / 2)  # the compiler reads what is read once a little ahead
    return most
