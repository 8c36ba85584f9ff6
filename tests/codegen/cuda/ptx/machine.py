"""An interpreter of PTX: all threads of a launch at once, those at the lowest instruction first.

Nothing here is shared with the emulator, which runs C++; both run what the generator wrote, this after nvcc compiled it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np

from tests.codegen.cuda.ptx import arithmetic
from tests.codegen.cuda.ptx.memory import Accesses, Arena, Fault
from tests.codegen.cuda.ptx.program import TYPES, Entry, Instruction

LIMIT = 400_000
"""Instructions of a launch, for which each group of threads counts once."""
UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
Array = np.ndarray


class Machine:
    """One launch."""

    def __init__(self, entry: Entry, arena: Arena, blocks: int, threads: int, arguments: Sequence[Array]) -> None:
        self.entry, self.blocks, self.threads = entry, blocks, threads
        self.count = blocks * threads
        self.memory = Accesses(arena, entry.shared_bytes, blocks, threads)
        self.arguments = dict(zip((name for name, _ in entry.parameters), arguments, strict=True))
        self.special = {
            "%tid.x": np.tile(np.arange(threads, dtype=np.uint32), blocks),
            "%ctaid.x": self.memory.block_of.astype(np.uint32),
            "%ntid.x": np.full(self.count, threads, np.uint32),
            "%nctaid.x": np.full(self.count, blocks, np.uint32),
        }
        self.registers: dict[str, Array] = {}
        self.passed: dict[str, Array] = {}
        """Parameters and results of calls."""
        self.position = np.zeros(self.count, np.int64)
        self.done, self.waiting = np.zeros(self.count, bool), np.zeros(self.count, bool)
        self.barrier = np.zeros(self.count, np.int64)
        """The number of the barrier at which a thread waits: 0 is the block's, others are those of teams."""
        self.team = 0
        """Threads that meet at barriers of teams."""

    def run(self) -> list[str]:
        """Run to the end; what was found. Raises `Fault`."""
        steps = 0
        with np.errstate(all="ignore"):
            while not self.done.all():
                ready = ~self.done & ~self.waiting
                if not ready.any():
                    self._release()
                    continue
                steps += self._advance(ready)
                if steps > LIMIT:
                    raise Fault("too many instructions")
        return sorted(self.memory.findings)

    # ---- control --------------------------------------------------------------------------------------------------
    def _release(self) -> None:
        """All threads that are not done wait at a barrier: let teams that have met go on, or else whole blocks."""
        released = False
        for block in range(self.blocks):
            members = np.arange(block * self.threads, (block + 1) * self.threads)
            for number in np.unique(self.barrier[members][self.waiting[members]]):
                here = members[self.waiting[members] & (self.barrier[members] == number)]
                if number and len(here) == self.team:
                    self._go_on(here, self.team)
                    released = True
        for block in range(self.blocks) if not released else ():
            members = np.arange(block * self.threads, (block + 1) * self.threads)
            if self.done[members].any() and self.waiting[members].any():
                self.memory.findings["a barrier that some threads never reach"] += 1
            if len(here := members[self.waiting[members]]):
                self._go_on(here)

    def _go_on(self, threads: Array, size: int = 0) -> None:
        if len(np.unique(self.position[threads])) > 1:
            self.memory.findings["threads wait at different barriers"] += 1
        self.position[threads] += 1
        self.waiting[threads] = False
        self.memory.barrier(threads, size)

    def _advance(self, ready: Array) -> int:
        """Run the threads at the lowest instruction until they branch or reach others; the number of steps."""
        current = int(self.position[ready].min())
        here = np.nonzero(ready & (self.position == current))[0]
        others = self.position[ready & (self.position != current)]
        stop = int(others.min()) if len(others) else len(self.entry.code)
        steps = 0
        while current < min(stop, len(self.entry.code)):
            instruction, steps = self.entry.code[current], steps + 1
            threads = here
            if instruction.guard:
                holds = self.read(instruction.guard, "pred", here)
                threads = here[~holds] if instruction.negated else here[holds]
            if instruction.name in ("bra", "ret", "exit", "bar"):
                self._control(instruction, current, here, threads)
                return steps
            if len(threads):
                self._execute(instruction, threads)
            current += 1
        self.position[here] = current
        self.done[here] |= current >= len(self.entry.code)
        return steps

    def _control(self, instruction: Instruction, current: int, here: Array, threads: Array) -> None:
        self.position[here] = current + 1
        match instruction.name:
            case "bra":
                self.position[threads] = self.entry.labels[instruction.operands[0]]
            case "bar":
                if len(threads) != len(here):
                    raise Fault(f"a barrier under a condition: {instruction.text}")
                self.position[here], self.waiting[here] = current, True
                number, *size = instruction.operands
                self.barrier[here] = self.read(number, "u32", here)
                self.team = int(self.read(size[0], "u32", here)[0]) if size else self.team
            case _:
                self.done[threads] = True

    # ---- registers ------------------------------------------------------------------------------------------------
    def _register(self, name: str, dtype: np.dtype) -> Array:
        if name not in self.registers:
            prefix = re.match(r"%[a-zA-Z]+", name)
            kind = self.entry.registers.get(prefix[0]) if prefix else None
            dtype = TYPES[kind] if kind else dtype
            held = dtype if dtype.kind == "b" else UNSIGNED[dtype.itemsize]
            self.registers[name] = np.zeros(self.count, held)
        return self.registers[name]

    def read(self, operand: str, kind: str, threads: Array) -> Array:
        """The value of a register, a constant or the address of a variable, per thread."""
        dtype = TYPES[kind]
        if operand in self.special:
            return self.special[operand][threads].astype(dtype)
        if operand.startswith("%"):
            value = self._register(operand, dtype)[threads]
            if "b" in (dtype.kind, value.dtype.kind):
                return value.astype(dtype)
            return value.astype(UNSIGNED[dtype.itemsize]).view(dtype)
        if operand in self.entry.shared:
            return np.full(len(threads), self.entry.shared[operand], dtype)
        return np.full(len(threads), _constant(operand, dtype), dtype)

    def write(self, name: str, value: Array, threads: Array) -> None:
        """Set a register."""
        if name == "_":
            return
        register = self._register(name, value.dtype)
        if register.dtype.kind == "b":
            register[threads] = value
            return
        if value.dtype.kind == "f":
            value = value.view(UNSIGNED[value.dtype.itemsize])
        if value.dtype.itemsize != register.dtype.itemsize and value.dtype.kind == "i":
            value = value.astype(f"i{register.dtype.itemsize}")  # with its sign
        register[threads] = value.astype(register.dtype) if value.dtype.kind == "u" else value.view(register.dtype)

    # ---- instructions ---------------------------------------------------------------------------------------------
    def _execute(self, instruction: Instruction, threads: Array) -> None:
        name, parts, operands, kind = instruction.name, instruction.parts, instruction.operands, instruction.type
        match name:
            case "ld" | "st" if parts[1] == "param":
                self._parameter(instruction, threads)
            case "ld" | "st":
                self._access(instruction, threads)
            case "call":
                passed = [self.passed[p][threads] for p in re.findall(r"param\d+", operands[-1])]
                result = self.passed.setdefault("retval0", np.zeros(self.count))
                result[threads] = arithmetic.function(instruction.text, passed)
            case "shfl":
                self._shuffle(instruction, threads)
            case "mov" if "{" in operands[0] + operands[1]:
                self._packed(instruction, threads)
            case "cvt":
                source = "b16" if parts[-1] in ("f16", "bf16") else parts[-1]
                self.write(
                    operands[0], arithmetic.converted(parts[1:], self.read(operands[1], source, threads)), threads
                )
            case "setp":
                x, y = (self.read(o, kind, threads) for o in operands[1:3])
                self.write(operands[0], arithmetic.compared(parts[1], x, y), threads)
            case "selp":
                x, y = (self.read(o, kind, threads) for o in operands[1:3])
                chosen = self.read(operands[3], "pred", threads)
                self.write(operands[0], np.where(chosen, x, y).astype(TYPES[kind]), threads)
            case _:
                self.write(operands[0], self._computed(instruction, threads), threads)

    def _computed(self, instruction: Instruction, threads: Array) -> Array:
        name, parts, kind = instruction.name, instruction.parts, instruction.type
        first, *rest = instruction.operands[1:]
        x = self.read(first, kind, threads)
        if name in ("mov", "cvta"):
            return x
        if name == "bfi":
            into, *where = (self.read(o, k, threads) for o, k in zip(rest, (kind, "u32", "u32"), strict=True))
            return arithmetic.inserted(x, into, *where)
        if name in arithmetic.UNARY and not rest:
            return arithmetic.UNARY[name](x).astype(TYPES[kind])
        y = self.read(rest[0], "u32" if name in ("shl", "shr") else kind, threads)
        if name == "fma":
            return arithmetic.fused(x, y, self.read(rest[1], kind, threads), parts)
        if name in ("mul", "mad") and "wide" in parts:
            wide = arithmetic.WIDER[kind]
            product = x.astype(wide) * y.astype(wide)
            more = f"{kind[0]}{2 * int(kind[1:])}"
            return product if name == "mul" else product + self.read(rest[1], more, threads)
        if name in ("mul", "mad") and "hi" in parts:
            product = arithmetic.high(x, y)
            return product if name == "mul" else product + self.read(rest[1], kind, threads)
        if name == "mad":
            return (x * y + self.read(rest[1], kind, threads)).astype(TYPES[kind])
        if name not in arithmetic.BINARY:
            raise Fault(f"an unknown instruction: {instruction.text}")
        return arithmetic.BINARY[name](x, y).astype(TYPES[kind])

    def _parameter(self, instruction: Instruction, threads: Array) -> None:
        register, place = instruction.operands if instruction.name == "ld" else instruction.operands[::-1]
        name, dtype = place.strip("[]").split("+")[0], TYPES[instruction.type]
        if instruction.name == "st":
            self.passed.setdefault(name, np.zeros(self.count, dtype))[threads] = self.read(
                register, instruction.type, threads
            )
        elif name in self.passed:
            self.write(register, self.passed[name][threads], threads)
        else:
            self.write(register, np.full(len(threads), self.arguments[name], dtype), threads)

    def _access(self, instruction: Instruction, threads: Array) -> None:
        """A load or store of one or several neighboring elements."""
        write, space, dtype = instruction.name == "st", instruction.parts[1], TYPES[instruction.type]
        place, held = instruction.operands if write else instruction.operands[::-1]
        registers = [r.strip() for r in held.strip("{}").split(",")]
        width = len(registers) * dtype.itemsize
        at = self.memory.checked(
            space, self._address(place, threads), threads, dtype.itemsize, width, write, instruction.text
        )
        cells = self.memory.bytes(space).view(dtype)
        for number, register in enumerate(registers):
            index = at // dtype.itemsize + number
            if write:
                cells[index] = self.read(register, instruction.type, threads)
            else:
                self.write(register, cells[index], threads)

    def _address(self, operand: str, threads: Array) -> Array:
        found = re.match(r"\[([^\]+]+)(?:\+(-?\d+))?\]", operand)
        if found is None:
            raise Fault(f"an unknown address: {operand}")
        base, offset = found[1], int(found[2] or 0)
        if not base.startswith("%"):
            return np.full(len(threads), self.entry.shared[base] + offset, np.int64)
        width = self._register(base, TYPES["u64"]).dtype.itemsize
        return self.read(base, f"u{8 * width}", threads).astype(np.int64) + offset

    def _shuffle(self, instruction: Instruction, threads: Array) -> None:
        """`shfl.sync.bfly`: lanes of a warp exchange values; all that the mask names must be there."""
        target, source, across, _, mask = instruction.operands
        value, named = self.read(source, "b32", threads), self.read(mask, "u32", threads)
        if instruction.parts[2] != "bfly":
            raise Fault(f"an unknown shuffle: {instruction.text}")
        here = np.zeros(self.count, bool)
        here[threads] = True
        lane, warp = threads % self.threads % 32, threads - threads % self.threads % 32
        for other in range(32):
            wanted = (named >> np.uint32(other) & 1).astype(bool)
            if (wanted & ~here[np.minimum(warp + other, self.count - 1)]).any():
                raise Fault(f"a shuffle with lanes that are not there: {instruction.text}")
        if not (named >> lane.astype(np.uint32) & 1).all():
            raise Fault(f"a shuffle by a lane that its mask lacks: {instruction.text}")
        everyone = np.zeros(self.count, np.uint32)
        everyone[threads] = value
        partner = warp + (lane ^ self.read(across, "u32", threads).astype(np.int64))
        self.write(target.split("|")[0], everyone[partner], threads)

    def _packed(self, instruction: Instruction, threads: Array) -> None:
        """`mov` between one register and several narrower ones."""
        to, source = instruction.operands
        parts = [p.strip() for p in (to if "{" in to else source).strip("{}").split(",")]
        bits = int(instruction.type[1:]) // len(parts)
        if "{" in to:
            value = self.read(source, instruction.type, threads).astype(np.uint64)
            for number, part in enumerate(parts):
                piece = value >> np.uint64(bits * number) & np.uint64((1 << bits) - 1)
                self.write(part, piece.astype(TYPES[f"b{bits}"]), threads)
            return
        total = np.zeros(len(threads), np.uint64)
        for number, part in enumerate(parts):
            total |= self.read(part, f"b{bits}", threads).astype(np.uint64) << np.uint64(bits * number)
        self.write(to, total.astype(TYPES[instruction.type]), threads)


def _constant(operand: str, dtype: np.dtype) -> object:
    if operand.startswith(("0f", "0d")):
        return struct.unpack(">f" if operand[1] == "f" else ">d", bytes.fromhex(operand[2:]))[0]
    if not re.match(r"-?\d", operand):
        raise Fault(f"an unknown operand: {operand}")
    value = int(operand.rstrip("U"), 0)
    if dtype.kind in "bf":
        return value
    size = dtype.itemsize
    return np.array([value & (1 << 8 * size) - 1], UNSIGNED[size]).view(dtype)[0]
