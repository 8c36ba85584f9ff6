"""Memory of an interpreted launch: where accesses may go, and which of them race.

Two accesses of a byte race if one of them writes, different threads do them, and no barrier of their block is between,
nor one of their team.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

NOBODY, MANY = -1, -2
GAP = 64
"""Bytes between allocations, which nothing may touch."""
FILLER = 255
TURNS = 32
"""The bits of a thread's clock that count barriers of its team; those above count barriers of its block."""


class Fault(Exception):
    """An access or instruction that a GPU would refuse, or whose result would be undefined."""


class Marks:
    """Who accessed each cell of a memory last, and at which time by the clock of that thread."""

    def __init__(self, cells: int, block_of: np.ndarray, team_of: np.ndarray) -> None:
        self.block_of, self.team_of = block_of, team_of
        self.writer, self.reader, self.reader_block, self.reader_team = (
            np.full(cells, NOBODY, np.int32) for _ in range(4)
        )
        self.written_at, self.read_at = (np.full(cells, -1, np.int64) for _ in range(2))

    def race(self, cells: np.ndarray, threads: np.ndarray, clock: np.ndarray, write: bool) -> str:
        """Note accesses, one per thread, at the same time; how they race, or an empty string."""
        kind, writer = "", self.writer[cells]
        before = np.maximum(writer, 0)
        ordered = self._ordered(self.block_of[before], self.team_of[before], self.written_at[cells], threads, clock)
        if ((writer != NOBODY) & (writer != threads) & ~ordered).any():
            kind = "write after write" if write else "read after write"
        if write:
            reader = self.reader[cells]
            ordered = self._ordered(
                self.reader_block[cells], self.reader_team[cells], self.read_at[cells], threads, clock
            )
            if ((reader != NOBODY) & (reader != threads) & ~ordered).any():
                kind = "write after read"
            if len(np.unique(cells)) < len(cells):
                kind = "write and write"
            self.writer[cells], self.written_at[cells] = threads, clock
            return kind
        self._read(cells, threads, clock)
        return kind

    def _ordered(
        self, block: np.ndarray, team: np.ndarray, at: np.ndarray, threads: np.ndarray, clock: np.ndarray
    ) -> np.ndarray:
        """Whether a barrier is between accesses by a block and team at a time, and those by these threads now."""
        own = (team == self.team_of[threads]) & (at < clock)
        return (block == self.block_of[threads]) & ((at >> TURNS < clock >> TURNS) | own)

    def _read(self, cells: np.ndarray, threads: np.ndarray, clock: np.ndarray) -> None:
        reader, block, team = self.reader[cells], self.reader_block[cells], self.reader_team[cells]
        stale = (reader == NOBODY) | self._ordered(block, team, self.read_at[cells], threads, clock)
        places, first, inverse = np.unique(cells, return_index=True, return_inverse=True)
        for held, mine in (
            (self.reader, threads),
            (self.reader_block, self.block_of[threads]),
            (self.reader_team, self.team_of[threads]),
        ):
            before = held[cells]
            held[cells] = np.where(stale | (before == mine), mine, MANY)
            apart = np.zeros(len(places), bool)
            np.logical_or.at(apart, inverse, mine != mine[first][inverse])
            held[places[apart]] = MANY
        self.read_at[cells] = clock


class Arena:
    """Global memory: allocations at 256 bytes with gaps between them."""

    def __init__(self, size: int) -> None:
        size = -(-size // 4096) * 4096
        self._raw = np.zeros(size + 4096, np.uint8)
        start = -self._raw.ctypes.data % 4096
        self.bytes = self._raw[start : start + size]
        self.base, self.top = self.bytes.ctypes.data, 256
        self.allowed = np.zeros(size, bool)

    def allocate(self, content: np.ndarray, offset: int = 0) -> int:
        """The address of a copy of these bytes, `offset` bytes after a multiple of 256."""
        start = -(-self.top // 256) * 256 + offset
        self.bytes[start : start + len(content)] = content
        self.allowed[start : start + len(content)] = True
        self.top = start + len(content) + GAP
        return self.base + start

    def content(self, address: int, size: int) -> np.ndarray:
        """Bytes at an address."""
        return self.bytes[address - self.base : address - self.base + size]


class Accesses:
    """Checks of one launch's accesses; what it finds is counted in `findings`."""

    def __init__(self, arena: Arena, shared_bytes: int, blocks: int, threads: int) -> None:
        self.arena, self.shared_bytes, self.findings = arena, shared_bytes, Counter[str]()
        self.block_of = np.repeat(np.arange(blocks, dtype=np.int32), threads)
        self.team_of = np.arange(blocks * threads, dtype=np.int32)
        """Threads with the same number have met at barriers of their own."""
        self.clock = np.zeros(blocks * threads, np.int64)
        self.shared = np.zeros(blocks * shared_bytes, np.uint8)
        self.written = np.zeros(blocks * shared_bytes, bool)
        self.marks = {
            "global": Marks(len(arena.bytes), self.block_of, self.team_of),
            "shared": Marks(blocks * shared_bytes, self.block_of, self.team_of),
        }

    def bytes(self, space: str) -> np.ndarray:
        """All bytes of a memory."""
        return self.arena.bytes if space == "global" else self.shared

    def barrier(self, threads: np.ndarray, size: int = 0) -> None:
        """These threads met: those of a block, or a team of so many."""
        if size:
            self.team_of[threads] = threads // size
            self.clock[threads] += 1
        else:
            self.clock[threads] = (self.clock[threads] >> TURNS) + 1 << TURNS

    def checked(
        self, space: str, address: np.ndarray, threads: np.ndarray, element: int, width: int, write: bool, text: str
    ) -> np.ndarray:
        """Where in `bytes` the accesses lie. `width` bytes are accessed at once, in elements of `element` bytes."""
        if (address % width).any():
            raise Fault(f"a misaligned access of {width} bytes: {text}")
        blocks = self.block_of[threads]
        if space == "global":
            place, end = address - self.arena.base, len(self.arena.bytes)
        else:
            place, end = address, self.shared_bytes
        if ((place < 0) | (place + width > end)).any():
            raise Fault(f"an access beyond {space} memory: {text}")
        if space == "shared":
            place = place + blocks.astype(np.int64) * self.shared_bytes
        for start in range(0, width, element):
            cells = place + start
            if space == "global" and not (self.allowed(cells, element)):
                raise Fault(f"out of bounds: {text}")
            if kind := self.marks[space].race(cells, threads, self.clock[threads], write):
                self.findings[f"{space} race, {kind}: {text}"] += 1
            if space == "shared":
                self._initialized(cells, element, write, text)
        return place

    def allowed(self, cells: np.ndarray, element: int) -> bool:
        """Whether elements lie within allocations."""
        return bool(self.arena.allowed[cells].all() and self.arena.allowed[cells + element - 1].all())

    def _initialized(self, cells: np.ndarray, element: int, write: bool, text: str) -> None:
        for byte in range(element):
            if write:
                self.written[cells + byte] = True
            elif not self.written[cells + byte].all():
                self.findings[f"shared memory is read before it is written: {text}"] += 1
                return
