"""Ranks: the processes that train together, on a process group of PyTorch's.

Every step begins with a row of numbers per rank, exchanged while the program computes: whether the rank runs the step
at all, which collectives it runs, and how many rows its batch has. The first collective of the program waits for it.
So ranks that differ stop before they exchange a gradient, with an error that names them. What a rank says beyond
numbers (an error's text, the list of its collectives) is in the store of the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from daceml_train.errors import ExecutionError

SLICE = timedelta(seconds=1)
"""How long a rank waits for the others before it looks whether one of them has failed."""
GRACE = 3.0
"""Seconds that a rank waits for a sign of life of the others once a connection is lost."""
RELEASE = 0.2
"""Seconds for which a process that ends lets other threads run. A thread of gloo's releases the tensors of a finished
collective with the interpreter's lock; if it asks for that lock after the interpreter has begun to end, the process
aborts ("terminate called without an active exception", PyTorch 2.13).
"""
RUNS, FAILED = 1, 2
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in PyTorch 2.13
_COLUMNS = 4


class RankError(ExecutionError):
    """The processes of a step cannot go on together; the message names the ranks and the cause."""

    def __init__(self, message: str) -> None:
        super().__init__(message, -1)


def _timeout(group: dist.ProcessGroup) -> float:
    """The timeout of a process group in seconds."""
    device = torch.device("cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu")
    given: timedelta = group._get_backend(device).options._timeout
    return given.total_seconds()


class Ranks:
    """The processes of `group` in the steps of one `TrainingStep`. Not thread-safe: a step runs alone."""

    created: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, int]] = weakref.WeakKeyDictionary()
    """How many there have been of each group: equal on all of its ranks, which construct steps in one order."""
    broken: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, str]] = weakref.WeakKeyDictionary()
    """Groups on which nothing more can run, and why: a rank failed where the others wait in a collective, which would
    take the next one for its partner.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
        self.device = torch.device(device)
        if not Ranks.created:
            atexit.register(time.sleep, RELEASE)
        Ranks.created[group] = Ranks.created.get(group, 0) + 1
        self.store, self.prefix = group.get_group_store(), f"daceml_train/{Ranks.created[group]}"
        self.patience = _timeout(group)
        """Seconds after which a rank that says nothing is taken for lost."""
        self.error: RankError | None = None
        """What a collective of the running program raised."""
        self.steps = -1  # the construction of the step counts as 0
        self.met = False
        """Whether the ranks of this step have found that they can run it together; before, none has updated."""
        self.settled = False
        """Whether no rank waits any more for what another one says; see `tell`."""
        self.rows: list[int] = []
        """The rows of each rank in the step whose exchange is over."""
        self.sent: dict[tuple[str, int], int] = {}
        """Bytes that this rank sent last in collectives whose size depends on data, by name and position."""
        self.started: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        """Collectives that have begun, by position and address of their result, with the memory that they write."""
        self.requests: dict[int, Any] = {}
        """What was asked for in the lookups of divided tables whose gradients are not returned yet, by position."""
        self.spent: deque[float] = deque(maxlen=32)
        """Processor seconds of this thread in the collectives of each of the last programs: copies, sums of rows."""
        self._reference = self._largest = 0
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._begun = False
        self._digests: dict[str, int] = {}

    # ---- a step -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step of all ranks. An error inside it reaches the other ranks."""
        if (why := Ranks.broken.get(self.group)) is not None:
            raise RankError(f"{why}; start all processes from a checkpoint")
        self.steps, self._begun, self._sent, self.error = self.steps + 1, False, None, None
        self.met = False
        self.sent.clear()
        self.requests.clear()
        self._largest = self._reference
        try:
            yield
            self.agreed()
        except RankError:
            raise
        except BaseException as error:
            self._tell(error)
            raise

    def begin(self, described: str, rows: int, numbers: bytes = b"") -> None:
        """Say that this rank runs the collectives that `described` lists, on a batch of `rows` rows, with these numbers
        as the optimizer's hyper-parameters.
        """
        if not self._begun:
            if not self.settled:
                self._put(f"begun/{self.steps}/{self.rank}", "")  # for those that wait for what this rank does not say
            self._send(RUNS, self._digest(described), rows, zlib.crc32(numbers))

    def agreed(self) -> None:
        """Wait until all ranks have begun. Raises `RankError` if one of them failed, or if they differ."""
        if self._sent is None:
            return
        (table, work), self._sent = self._sent, None
        self.finish(work)
        state, digest, rows, numbers = table.t().tolist()
        if FAILED in state:
            raise RankError(self._failure(state.index(FAILED)))
        if len(set(digest)) > 1:
            raise RankError(f"the ranks run different steps: {self._difference(digest)}")
        if len(set(numbers)) > 1:
            raise RankError("the ranks have different learning rates or other options of the optimizer")
        if self.steps and not any(rows):
            raise RankError(f"no rank has data in step {self.steps}")
        self.rows, self._reference, self.met = rows, max(rows), True

    def weight(self, rows: int) -> float:
        """The weight of this rank's batch of `rows` rows: 1 for the largest batch of the step before.

        The first step waits for the exchange to know it. All programs of a step have one measure.
        """
        if not self._largest:
            self.agreed()
            self._largest = self._reference
        return rows / self._largest

    def send(self, kind: str, position: int, sent: int) -> None:
        """Note what this rank sent in a collective whose size depends on data, which may run several times a step."""
        self.sent[kind, position] = self.sent.get((kind, position), 0) + sent

    @property
    def largest(self) -> int:
        """The rows of the largest batch of the last step; 0 before the first one."""
        return self._reference

    @functools.cached_property
    def mesh(self) -> dist.device_mesh.DeviceMesh:
        """The ranks as a device mesh."""
        return dist.device_mesh.DeviceMesh.from_group(self.group, self.device.type)

    def tell(self, topic: str, text: str) -> list[str | None]:
        """What each rank says on a topic in this step; None for one that has failed or begins without saying it."""
        self._put(f"{topic}/{self.steps}/{self.rank}", text)
        deadline = time.monotonic() + self.patience
        waiting, pause = set(range(self.size)), 0.001
        while waiting:
            waiting -= {
                rank
                for rank in waiting
                if self._has(f"{topic}/{self.steps}", rank)
                or self._has(f"begun/{self.steps}", rank)
                or self._has(f"raised/{self.steps}", rank)
            }
            if waiting and time.monotonic() > deadline:
                self._break(f"rank {', '.join(map(str, sorted(waiting)))} says nothing in step {self.steps}")
            time.sleep(pause if waiting else 0)
            pause = min(2 * pause, 0.1)
        said = [(f"{topic}/{self.steps}", rank) for rank in range(self.size)]
        return [self._get(f"{key}/{rank}") if self._has(key, rank) else None for key, rank in said]

    # ---- collectives --------------------------------------------------------------------------------------------
    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a dense tensor by its sum over all ranks."""
        self.agreed()
        self.finish(dist.all_reduce(tensor, group=self.group, async_op=True))

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all ranks, weighed by the rows of their batches in this step."""
        self.agreed()
        most = max(self.rows)
        total = tensor.detach().clone(memory_format=torch.contiguous_format).mul_(self.rows[self.rank] / most)
        self.sum(total)
        return total.div_(sum(self.rows) / most)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, which have one shape, one after the other."""
        self.agreed()
        found = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self.finish(self.gathering(found, tensor.contiguous()))
        return found

    def gathering(self, found: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Begin to gather the dense tensors of all ranks in `found`."""
        return _all_gather(found, tensor, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace a dense tensor by that of rank `root`."""
        self.finish(dist.broadcast(tensor, group=self.group, group_src=root, async_op=True))

    def finish(self, work: Any) -> None:
        """Wait for a collective. Raises `RankError` if another rank has failed or is gone."""
        if self.device.type != "cpu":
            work.wait()
            return
        while True:
            over = work.is_completed()  # asked before: what ends just after a wait has timed out is no failure
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                for rank in range(self.size):
                    if self._has("failed", rank):
                        self._break(self._failure(rank))
                if over:
                    gone = ", ".join(map(str, self._gone()))
                    which = f"rank {gone} is gone" if gone else "a connection between ranks broke, or timed out,"
                    self._break(f"{which} in step {self.steps} ({str(error).splitlines()[0]})")

    # ---- what ranks say -----------------------------------------------------------------------------------------
    def _send(self, state: int, digest: int = 0, rows: int = 0, numbers: int = 0) -> None:
        table = torch.zeros((self.size, _COLUMNS), dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor([state, digest, rows, numbers], device="cpu")
        self._begun, self._sent = True, (table, dist.all_reduce(table, group=self.group, async_op=True))

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks know of an error of this one."""
        text = f"{type(error).__name__}: {error}".split("\n\n")[0]
        if self._begun:  # the others are at a collective that this rank does not reach
            why = f"rank {self.rank} raised {text} while it ran step {self.steps}"
            Ranks.broken[self.group] = why
            self._put(f"failed/{self.rank}", why)
            return
        self._put(f"raised/{self.steps}/{self.rank}", text)
        self._send(FAILED)
        with contextlib.suppress(RankError):
            self.agreed()

    def _failure(self, rank: int) -> str:
        if self._has("failed", rank):
            return self._get(f"failed/{rank}")
        text = self._get(f"raised/{self.steps}/{rank}")
        return f"rank {rank} raised {text}; no rank has updated a parameter in step {self.steps}"

    def _break(self, message: str) -> NoReturn:
        Ranks.broken[self.group] = message
        raise RankError(message)

    def _has(self, key: str, rank: int) -> bool:
        return bool(self.store.check([f"{self.prefix}/{key}/{rank}"]))

    def _put(self, key: str, text: str) -> None:
        self.store.set(f"{self.prefix}/{key}", text)

    def _get(self, key: str) -> str:
        return str(self.store.get(f"{self.prefix}/{key}").decode())

    def _gone(self) -> list[int]:
        """The ranks that do not give a sign of life, which each rank does that loses a connection."""
        self._put(f"alive/{self.rank}", "")
        deadline = time.monotonic() + GRACE
        gone = set(range(self.size))
        while gone and time.monotonic() < deadline:
            gone -= {rank for rank in gone if self._has("alive", rank)}
            time.sleep(0.05)
        return sorted(gone)

    def _digest(self, described: str) -> int:
        found = self._digests.get(described)
        if found is None:
            found = self._digests[described] = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
            self._put(f"text/{self.rank}/{found}", described)
        return found

    def _difference(self, digests: Sequence[int]) -> str:
        """Which ranks differ from rank 0, and what the first of them has that it has not, and the other way round."""
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        texts = [self._get(f"text/{rank}/{digests[rank]}").splitlines() for rank in (0, others[0])]
        only = [[line for line in text if line not in other] for text, other in (texts, texts[::-1])]
        messages = ["; ".join(lines[:3]) or "nothing more" for lines in only]
        named = ", ".join(map(str, others))
        return f"rank {named} differs from rank 0, which has: {messages[0]}; rank {others[0]} has: {messages[1]}"
