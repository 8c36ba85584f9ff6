"""Geometry: the launch configuration, which distributes the rows and lanes of a kernel over threads.

    thread    owns fragments: `width` neighboring lanes each, `fragments` of them at a time
    team      `team` threads that share a row: part of a warp, a warp, or several
    block     `threads` threads: one or more teams, each with rows of its own

Every lane map of a kernel assigns the same lanes to the same thread, so a thread reads its own stores without a
barrier. Barriers are needed only in reductions over a team or a block, and where a square is transposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daceml_train.codegen.kernel.loops import Loops
from daceml_train.codegen.kernel.staging import Stage, Staging
from daceml_train.tensor import hint, product, same

REGISTERS = 48
"""The largest number of values that a thread keeps in registers, besides those of the computation itself."""
SUMMING_REGISTERS = 64
"""The same where rows pass by: what a thread loads of a row, and its sums over rows. No more fit into 128 registers."""
VECTOR = 16
"""Bytes of the widest access."""
MOST_THREADS = 1024
SIDE = 32
"""Rows and lanes of a square; lanes of a block that combines partial results."""
SLICES = 8
"""Threads that share one lane's partial results."""
COMBINING = SIDE * SLICES
"""Threads of a block that combines partial results."""
FEW_THREADS = 1 << 14
"""Few rows are shared by more threads, until there are so many or each has one fragment."""
FULL_VALUES = 42
"""With more values than these in each thread, 512 threads may not have the registers, and 256 are enough where they
are few teams, which gain little by sharing a block."""
SUMMING_THREADS, SUMMING_BLOCKS = 512, 128
"""Blocks of rows that are summed over store what they have summed, so they have as many teams as leave so many blocks.
"""


@dataclass(frozen=True)
class Geometry:
    """A launch configuration. A team processes `capacity` lanes at a time.

    `resident`: a team, or block, has no more than `capacity` lanes; they stay in registers. `full`: it has exactly
    `capacity` lanes. `ragged`: the number of lanes need not be a multiple of `width`.
    """

    threads: int
    team: int
    width: int
    fragments: int = 1
    resident: bool = True
    tiled: bool = False
    """Whether the lanes are distributed over blocks, too."""
    full: bool = False
    ragged: bool = False
    ahead: int = 1
    """Rows whose loads a team issues together, if there is no barrier between rows."""
    each: int = 4
    """The sequential work of a thread (fragments of an elementwise kernel, rows of a team that sums them); it
    determines the number of blocks, not their code.
    """

    @property
    def capacity(self) -> int:
        """Lanes that a team processes at a time."""
        return self.team * self.width * self.fragments

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.threads // self.team


def choose(loops: Loops, phases: Staging) -> Geometry:
    """The geometry of a kernel, from its sizes; symbols count as 64 where correctness does not depend on them."""
    return candidates(loops, phases)[0]


def candidates(loops: Loops, phases: Staging) -> list[Geometry]:
    """Candidate geometries of a kernel: first the one that the sizes suggest, then its neighbors, for autotuning."""
    if loops.mode == "flat":
        results = _flat(loops)
    elif loops.mode == "tiles":
        results = [_tiles(loops, phases, threads) for threads in (128, 256, 64)]
    elif any(loops.kind(leaf) == "row" for leaf in loops.leaves.values()) or any(r.kept for r in phases.rows if r):
        results = _held_rows(loops, phases)
    else:
        results = _passing_rows(loops, phases)
    return list(dict.fromkeys(results))


def _flat(loops: Loops) -> list[Geometry]:
    """Threads with fragments of their own."""
    if loops.squares:
        return [Geometry(threads, 32, 1) for threads in (256, 128, 512)]
    width, ragged = _width(loops)
    types = [a.dtype for a in loops.reads] + [a.dtype for a in loops.results]
    arrays = sum(max(2, dtype.bytes) / 4 for dtype in types)
    width = _fitting(width, arrays, REGISTERS)  # all fragments of a thread are in registers at one time
    results = []
    for threads, w, each in ((256, width, 4), (256, width, 1), (128, width, 4), (512, width, 2), (256, width // 2, 4)):
        if w:
            results.append(Geometry(threads, 1, w, full=True, ragged=ragged and w > 1, each=each))
    return results


def _tiles(loops: Loops, phases: Staging, threads: int) -> Geometry:
    """Tiles of lanes; a block iterates over their rows."""
    width, ragged = _width(loops)
    width = _narrowed(width, loops, phases)
    lanes = product(a.size for a in loops.lane_axes)
    full = isinstance(lanes, int) and lanes % (threads * width) == 0
    return Geometry(threads, threads, width, full=full, ragged=ragged and width > 1, ahead=_ahead(loops, phases, width))


def _passing_rows(loops: Loops, phases: Staging) -> list[Geometry]:
    """Rows without kept values: teams of lanes, or blocks over which the lanes are distributed, too."""
    (widest, ragged), lanes = _width(loops), product(a.size for a in loops.lane_axes)
    widest = _narrowed(widest, loops, phases)
    results = []
    for threads, width, less, each in (
        (256, widest, 1, 8),
        (256, widest, 1, 32),
        (256, widest, 2, 8),
        (128, widest, 1, 8),
        (512, widest, 1, 8),
        (256, max(1, widest // 2), 1, 8),
    ):
        fragments = -(-lanes // width) if isinstance(lanes, int) else 0
        tiled = not 0 < fragments <= 32
        team, ahead = 32 if tiled else _power(fragments), max(1, _ahead(loops, phases, width) // less)
        full = isinstance(lanes, int) and (lanes % (32 * width) == 0 if tiled else lanes == team * width)
        rest = ragged and width > 1
        results.append(Geometry(threads, team, width, tiled=tiled, full=full, ragged=rest, ahead=ahead, each=each))
    return results


def _held_rows(loops: Loops, phases: Staging) -> list[Geometry]:
    """Rows that are read once and kept in registers, or, if they are too long, processed in steps."""
    (width, ragged), lanes = _width(loops), product(a.size for a in loops.lane_axes)
    values = max(1.0, _held(loops, phases))
    width = _fitting(width, values, REGISTERS)
    fragments = -(-lanes // width) if isinstance(lanes, int) else 0
    most = min(8, int(REGISTERS / (values * width)))
    ahead = _ahead(loops, phases, width)
    if not fragments or not most or _power(-(-fragments // most)) >= MOST_THREADS:
        team = min(MOST_THREADS // 2, max(64, _power(int(hint(lanes)) // (4 * width) or 256)))
        team = team if isinstance(lanes, int) else 256
        steps = [(team, 2), (min(MOST_THREADS // 2, 2 * team), 2), (max(64, team // 2), 2), (team, 4), (team, 1)]
        return [Geometry(t, t, width, n, resident=False, ragged=ragged, ahead=ahead, each=8) for t, n in steps]

    sums = any(loops.kind(leaf) == "column" for leaf in loops.leaves.values())
    rows = product(a.size for a in loops.row_axes)
    together = int(hint(rows)) // SUMMING_BLOCKS if sums else 1

    def held(team: int, threads: int, width: int = width) -> Geometry:
        count = -(-int(lanes) // (width * team))
        full, rest = lanes == team * width * count, ragged and width > 1
        many = values * width * count > FULL_VALUES and 4 * team >= SUMMING_THREADS
        summing = SUMMING_THREADS // 2 if many else SUMMING_THREADS
        threads = max(team, threads, min(summing, team * _power_below(together)))
        return Geometry(threads, team, width, count, full=full, ragged=rest, ahead=ahead, each=8)

    # more than a warp: the block, unless its rows are summed over
    team = min(32, _power(fragments)) if fragments <= 32 * most else _power(-(-fragments // most))
    while isinstance(rows, int) and rows * team < FEW_THREADS and team < min(_power(fragments), MOST_THREADS // 2):
        team *= 2
    results = [held(team, 128 if team <= 32 else team)]
    if team <= 32:
        results += [held(team, 256), held(team, 64)]
    for other in (2 * team, team // 2, 4 * team):
        if 1 <= other < MOST_THREADS and other < 2 * fragments and -(-fragments // other) <= 2 * most:
            results.append(held(other, 128 if other <= 32 else other))
    if width > 1 and 2 * team < MOST_THREADS:
        results.append(held(2 * team, 128 if team < 32 else 2 * team, width // 2))
    return results


def _ahead(loops: Loops, phases: Staging, width: int) -> int:
    """Rows that may be prefetched: as many as registers permit, four at most."""
    loads = [sum(_loaded(loops, stage.loads) for stage in rows.stages) for rows in phases.rows if rows]
    return max(1, min(4, _power_below(REGISTERS / (max(1.0, *loads, 1.0) * width))))


def _narrowed(width: int, loops: Loops, phases: Staging) -> int:
    """Fewer lanes per fragment, where a thread would not have the registers for what it loads and sums."""
    stages = [stage for rows in phases.rows if rows for stage in rows.stages]
    taken = max((_loaded(loops, stage.loads) + _summed(loops, stage) for stage in stages), default=0)
    if loops.mode == "tiles":  # a thread loads what it computes with its sums, too
        for columns in phases.columns:
            used = {i for v in columns.lanes for i in loops.leaves[v].inputs}
            taken = max(taken, _loaded(loops, [v for v in used if loops.leaves[v].op is None and loops.has_lanes(v)]))
    return _fitting(width, taken, SUMMING_REGISTERS)


def _fitting(width: int, registers: float, most: int) -> int:
    """The most lanes per fragment, `width` at most, that so many registers per lane leave room for."""
    while width > 1 and registers * width > most:
        width //= 2
    return width


def _loaded(loops: Loops, loads: Iterable[str]) -> float:
    """Registers per lane for what is loaded."""
    return sum(max(2, loops.leaves[v].dtype.bytes) / 4 for v in loads)


def _summed(loops: Loops, stage: Stage) -> float:
    """Registers per lane for the sums over rows that a stage adds to."""
    return sum(max(4, loops.leaves[v].dtype.bytes) / 4 for v in stage.columns)


def _power_below(number: float) -> int:
    """The largest power of two that is not greater; at least 1."""
    return 1 << (max(1, int(number)).bit_length() - 1)


def _power(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def _width(loops: Loops) -> tuple[int, bool]:
    """Lanes per fragment, and whether the last fragment may be partial.

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


def _held(loops: Loops, phases: Staging) -> float:
    """Registers per lane for kept values, in the phase that keeps most."""
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
        most = max(most, loads + kept + others / 2)  # the compiler hoists loads of values that are read once
    return most
