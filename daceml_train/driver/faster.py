"""Whether compiled pieces are worth it: some calls run them, some run the model as PyTorch does, and both are timed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Any

WARM, TIMED = 5, 4
"""So many calls compile and settle; after them, so many are timed with the pieces, and as many without."""

CLEARLY = 0.97
"""Pieces are kept if they take at most this share of PyTorch's time: timings of so few calls are not more precise."""

WARM_PATHS = 8
"""So many calls along paths come before their timing: a step of many ways has met most of them."""

RECENT_KINDS, NEW_KINDS = 8, 7
"""Where so many of the last calls were of a kind of their own, nearly every call is."""

LEFT_CALLS = 16
"""Where so many more calls have no program than have one, because of its cost, PyTorch runs all."""

LEFT_KINDS = 4096
"""Kinds that are remembered."""

NEW_KINDS_SLOWER = "nearly every call has sizes of its own, and binding a program takes longer than PyTorch's step"
"""Why PyTorch runs calls that differ in sizes."""

ENDLESS = "nearly every call takes a path of its own"
COSTLY = "there are so many paths that compiling them costs more than their programs save"
"""Why a search for paths has ended."""

SLOWER = "the compiled pieces are slower than PyTorch, which runs the model"
"""Why a model in pieces has none."""


LEVELS = 1.25
"""Levels are kept if they take at most this share of PyTorch's time: batches of trees differ in size."""

SLOWER_LEVELS = "a recursion over so few values that its levels are slower than PyTorch, which runs the model"
"""Why a recursion has no levels."""


class Faster:
    """Counts and times the calls of a step in pieces, or along paths."""

    def __init__(self, compiled: bool | None = None, warm: int = WARM) -> None:
        self.calls, self.warm = 0, warm
        self.compiled = compiled
        """Whether the compiled pieces are faster, once that is known."""
        self.best = {True: float("inf"), False: float("inf")}
        """The fastest call in seconds, with the compiled pieces and without."""

    def takes_pieces(self) -> bool:
        """Whether the next call runs the compiled pieces."""
        if self.compiled is not None:
            return self.compiled
        # The two ways change places (Thue and Morse's sequence): calls may differ in turns, as where one step has two.
        return self.calls < self.warm or (self.calls - self.warm).bit_count() % 2 == 0

    def ran(self, compiled: bool, seconds: float) -> bool:
        """Note a call; whether it has settled that PyTorch is faster."""
        self.calls += 1
        if self.compiled is not None or self.calls <= self.warm:
            return False
        self.best[compiled] = min(self.best[compiled], seconds)
        if self.calls < self.warm + 2 * TIMED:
            return False
        self.compiled = self.best[True] <= CLEARLY * self.best[False]
        return not self.compiled


class PathCosts:
    """What the programs of paths have cost in seconds, against what they have saved.

    The first paths have programs at once. All later ones together may cost as much again, and as much as calls by
    programs have saved: where Python chooses among hundreds of ways, most calls would wait for a compiler.
    """

    def __init__(self) -> None:
        self.early = self.late = self.saved = 0.0
        self.left = 0
        """How many more of the last calls had no program because of its cost than had one."""

    def allow(self) -> bool:
        """Whether a later path may have a program."""
        return self.late <= self.early + self.saved

    def paid(self, seconds: float, early: bool) -> None:
        """Note what a program has cost."""
        self.early, self.late = (self.early + seconds, self.late) if early else (self.early, self.late + seconds)

    def ran(self, seconds: float, by_pytorch: float) -> None:
        """Note a call by a program, and what PyTorch takes for one, infinity if that is not known."""
        self.saved += max(by_pytorch - seconds, 0.0) if by_pytorch < float("inf") else 0.0
        self.left = max(self.left - 1, 0)

    def leave(self) -> bool:
        """Note a call without a program; whether there are too many of them."""
        self.left += 1
        return self.left >= LEFT_CALLS


class NewKinds:
    """Whether a call of a kind of arguments that was not met before is worth binding a program to it.

    Where nearly every call has sizes of its own, binding may take longer than PyTorch's whole step: then calls that
    bind and calls that do not take turns, and both are timed. A kind that is met again is bound in any case.
    """

    def __init__(self) -> None:
        self.recent: deque[bool] = deque(maxlen=RECENT_KINDS)
        """Whether each of the last calls was of a new kind."""
        self.left: OrderedDict[Any, None] = OrderedDict()
        """Kinds that PyTorch ran."""
        self.faster = Faster(warm=0)

    @property
    def many(self) -> bool:
        """Whether nearly every call is of a new kind."""
        return sum(self.recent) >= NEW_KINDS

    def binds(self, kind: Any) -> bool:
        """Whether a program is to run the next call, whose kind is new, or None if only the program can tell."""
        if not self.many or kind in self.left or self.faster.takes_pieces():
            self.left.pop(kind, None)
            return True
        if kind is not None:
            self.left[kind] = None
            if len(self.left) > LEFT_KINDS:
                self.left.popitem(last=False)
        return False

    def ran(self, bound: bool, new: bool, seconds: float) -> bool:
        """Note a call, by a program or not, of a new kind or not; whether that has settled that PyTorch is faster."""
        self.recent.append(new)
        return new and self.many and self.faster.ran(bound, seconds)


class NewSizes:
    """Whether calls of a compiled graph with sizes of their own are worth binding plans to them; see `NewKinds`.

    Calls are timed in the user's loop, from one to the next, so that the backward pass counts.
    """

    def __init__(self) -> None:
        self.kinds = NewKinds()
        self._last: tuple[bool, bool, int, int, float] | None = None
        """Of the last call, whether a program ran it, and whether its sizes were new; how many had known sizes without
        being asked about; the thread, and its seconds when the call began."""

    def binds(self, sizes: Any, known: bool, others: int) -> bool:
        """Whether a program is to run the next call, for whose sizes a plan is `known` or not.

        `others` calls of known sizes were not asked about so far.
        """
        thread = threading.get_ident()
        if self._last is not None:
            bound, new, before, calls, start = self._last
            if thread == before and others == calls:
                self.kinds.ran(bound, new, time.thread_time() - start)
            else:
                self.kinds.recent += [new, *[False] * min(others - calls, RECENT_KINDS)]
        binds = known or self.kinds.binds(sizes)
        self._last = binds, not known, thread, others, time.thread_time()
        return binds

    @property
    def slower(self) -> bool:
        """Whether it is settled that PyTorch is faster for new sizes, as long as nearly all are."""
        return self.kinds.faster.compiled is False


class FasterModule:
    """Times a module in the user's loop, from one call to the next, so that backward pass and update count.

    A step of the user's may call it several times: `TIMED` calls with the compiled pieces are compared with as many
    after them without.
    """

    def __init__(self, share: float = CLEARLY) -> None:
        self.calls, self.share = 0, share
        self.compiled: bool | None = None
        """Whether the compiled pieces are faster, once that is known: they take at most this share of the time."""
        self._programs = self._runs = 0
        self._start = self._seconds = 0.0

    def disturbed(self) -> None:
        """Note a call that belongs to no training."""
        self.calls = min(self.calls, WARM - 1)

    def takes_pieces(self, programs: int, runs: int, broken: bool) -> bool:
        """Whether the next call runs compiled code, of which there are so many programs, which ran so many times.

        `broken`: whether something is known to run in PyTorch.
        """
        if self.compiled is not None:
            return self.compiled
        self.calls += 1
        if self.calls == WARM + TIMED and programs != self._programs:
            self.calls = WARM  # something was compiled in between
        if self.calls == WARM:
            self._programs, self._runs, self._start = programs, runs, time.thread_time()
        elif self.calls == WARM + TIMED:
            ran, now = runs - self._runs, time.thread_time()
            if not ran or (ran == TIMED and not broken):
                self.compiled = ran > 0  # nothing is compiled, or one program is all of it
            self._seconds, self._start = now - self._start, now
        elif self.calls == WARM + 2 * TIMED:
            self.compiled = self._seconds <= self.share * (time.thread_time() - self._start)
        return self.calls < WARM + TIMED if self.compiled is None else self.compiled
