"""A training step that trains in PyTorch from its first call, while a copy of the process compiles it.

    call 1: PyTorch -> call 2: fork -> calls 2, 3, ...: PyTorch | the copy: capture, compile, run once, fill the cache
    the copy has ended -> next call: capture, load, take one step both ways, compare -> all further calls: compiled

Between two steps, the compiled step takes the same parameters, buffers, and optimizer state as they are, and PyTorch's
generator where it is. A kind of arguments that is new later goes the same way.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from daceml_train import logs
from daceml_train.driver.bound_step import BoundStep
from daceml_train.driver.checking import check_tensors
from daceml_train.driver.compiled_before import forget, known, remember
from daceml_train.driver.first_use import first_use
from daceml_train.driver.options import ScheduleKind
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import Loss, TrainingStep
from daceml_train.errors import DacemlError, Invalid, NotCompiled, message_of
from daceml_train.frontends.torch.dynamo.tracing import first_to_run
from daceml_train.runtime.forked import Forked, Tell
from daceml_train.training.gradients import Clipping

When = Literal["first_call", "background", "next_run"]
"""When a step is compiled: in its first call, beside calls that PyTorch runs, or so that the next run finds it."""

ATTEMPTS = 3
"""How often a kind of arguments is compiled in the background without success before PyTorch keeps it."""


@dataclass
class Compiling:
    """The compilation of a kind of arguments."""

    process: Forked | None = None
    kernels: tuple[int, int] = (0, 0)
    """How many kernels are compiled, of how many."""
    attempts: int = 0
    ready: bool = False
    """Whether the programs are in the cache."""
    remembered: bool = False
    """Whether an earlier run said that they are."""


_running: weakref.ref[Forked] | None = None
"""The compilation of this process that runs: one at a time leaves the other cores to training."""


def _busy() -> bool:
    process = _running() if _running is not None else None
    return process is not None and process.running


class BackgroundStep(TrainingStep):
    """See the module. `wait` lets a call wait for the compiler, and `compilation` says in words how far it is."""

    traces_user_code = False

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        options: Settings,
        keep_gradients: bool = False,
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: ScheduleKind = "ahead_of_time",
        swaps: bool = True,
    ) -> None:
        options = replace(options, compiled_only=True)
        super().__init__(model, loss, optimizer, options, keep_gradients, clipping, scaler, schedule)
        self.swaps = swaps
        """Whether a compiled step replaces PyTorch's in this run."""
        self.calls = 0
        self._trained: set[Any] = set()
        """The kinds of arguments on which PyTorch has trained, so that the optimizer's state exists."""
        self._seen_hooks: list[int] | None = None
        self._compiling: dict[Any, Compiling] = {}
        self._decided: dict[Any, bool] = {}
        """Where no swap is allowed: whether the first call of a kind of arguments found it compiled."""
        self._events: list[str] = []
        if any(t.device.type != "cpu" for t in self._parameters()):
            raise Invalid("compilation in the background forks the process, which its GPU does not survive")

    # ---- what users see -----------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        active = next(self._active(), None)
        return f"{super().__repr__()[:-1]}{f', {self._progress(active)}' if active else ''}>"

    @property
    def compilation(self) -> list[str]:
        """What has happened in the background, and what happens now, line by line."""
        return [*self._events, *map(self._progress, self._active())]

    def _active(self) -> Iterator[Compiling]:
        return (job for job in self._compiling.values() if job.process is not None and not job.process.foreign)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the compiler has ended, at most `timeout` seconds; whether it has.

        The next call of a step that was compiled runs it.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while any(self._poll(job) for job in self._compiling.values()):
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def _compiles_updates(self) -> bool:
        """Only where steps stay PyTorch's: until then, a call waits for no compiler."""
        return bool(self._in_pieces)

    def _progress(self, job: Compiling) -> str:
        assert job.process is not None
        seconds, (done, kernels) = time.monotonic() - job.process.started, job.kernels
        so_far = f"{done} of {kernels} kernels, " if kernels else ""
        return f"PyTorch trains while the step compiles in the background ({so_far}{seconds:.1f} s so far)"

    def _note(self, event: str) -> None:
        self._events.append(event)
        logs.event(logs.RECOMPILES, event)

    # ---- a step -------------------------------------------------------------------------------------------------
    def _local_step(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        self.calls += 1
        key, flat, bound = self._find(inputs, targets)
        if bound is None:
            if key in self._trained:
                self._start(key, inputs, targets, flat)
            loss = self._in_pytorch(key, inputs, targets)
            self._trained.add(key)
            return loss
        if not bound.used and not bound.first:
            return self._first_use(key, flat, bound, inputs, targets)
        found = self._run_bound(key, flat, bound, inputs, targets)
        return self._in_pytorch(key, inputs, targets) if found is None else found

    def _first_use(
        self, key: Any, flat: Sequence[Any], bound: BoundStep, inputs: Any, targets: tuple[Any, ...]
    ) -> torch.Tensor:
        """PyTorch's step, whose result stays, and the compiled one, which is dropped where they differ."""
        half = any(t.dtype in (torch.float16, torch.bfloat16) for t in (*self._parameters(), *bound.inputs))
        half = half or "precision" in str(self.options.pipeline).lower()
        found = first_use(bound, flat, lambda: self._in_pytorch(key, inputs, targets), half)
        bound.used = True
        if found.refusal:
            self._bound.pop(key, None)
            self._break(key, DacemlError(f"the step compiled in the background is not used: {found.refusal}"))
        else:
            self._note(f"step {self.calls}: the compiled step takes over ({found.compared})")
        return found.loss

    def _bind(self, key: Any, inputs: Any, targets: tuple[Any, ...], flat: Sequence[Any]) -> BoundStep | None:
        """The compiled step, if its programs are in the cache; None while PyTorch trains."""
        check_tensors(flat)
        if (seen := self._hooked()) != self._seen_hooks:
            self._seen_hooks = seen
            self._in_pieces.clear()
            self._compiling.clear()
        job = self._compiling.get(key)
        if key in self._in_pieces or (job is not None and (self._poll(job) or not job.ready)):
            return None
        if job is None and self.swaps and not self._captured({"self": self, "inputs": inputs, "targets": targets}):
            return None
        if not self.swaps and not self._decided.setdefault(key, True):
            return None
        try:
            bound = super()._bind(key, inputs, targets, flat)
        except NotCompiled as missing:
            self._missing(key, job, missing)
            return None
        self._compiling.pop(key, None)
        return bound

    def _captured(self, scope: dict[str, Any]) -> bool:
        """Whether the code for these arguments is captured already: binding it takes no time."""
        if self._hooks != self._seen_hooks:  # as before anything is captured, when TorchDynamo is not yet imported
            return False
        return first_to_run(self._code.__code__, scope) is not None

    def _missing(self, key: Any, job: Compiling | None, missing: NotCompiled) -> None:
        """The cache has not what it should have: it is compiled once more, for sizes that vary, for instance."""
        self._decided[key] = False
        if job is None:
            return
        if job.remembered:
            forget(self.options.cache, self._identity(key))
            del self._compiling[key]
            return
        job.ready, job.attempts = False, job.attempts + 1
        if job.attempts >= ATTEMPTS:
            self._break(key, missing)

    # ---- the copy of the process --------------------------------------------------------------------------------
    def _start(self, key: Any, inputs: Any, targets: tuple[Any, ...], flat: Sequence[Any]) -> None:
        """Fork, unless another copy still compiles: a later call starts this one."""
        global _running
        job = self._compiling.get(key)
        if key in self._in_pieces or _busy() or (job is not None and (job.process is not None or job.ready)):
            return
        if job is None and self.swaps and known(self.options.cache, self._identity(key)):
            self._compiling[key] = Compiling(ready=True, remembered=True)
            return
        job = self._compiling.setdefault(key, Compiling())
        try:
            job.process = Forked(lambda tell: self._compile(key, inputs, targets, flat, tell))
        except (OSError, MemoryError) as error:
            self._break(key, DacemlError(f"the process cannot be forked: {error}"))
            return
        _running = weakref.ref(job.process)

    def _compile(
        self, key: Any, inputs: Any, targets: tuple[Any, ...], flat: Sequence[Any], tell: Tell
    ) -> Mapping[str, Any]:
        """What the copy does: compile, run once, and keep nothing but the cache."""

        def progress(done: int, kernels: int) -> None:
            tell({"kernels": [done, kernels]})

        self.options = replace(self.options, compiled_only=False, progress=progress)
        bound = TrainingStep._bind(self, key, inputs, targets, flat)
        if bound is None:
            return {"break": self._in_pieces[key]}
        tell({"running": True})
        bound.run(flat, False)
        return {"warm": all(record.warm for record in self.records)}

    def _poll(self, job: Compiling) -> bool:
        """Whether the copy still works; what it has told is noted."""
        process = job.process
        if process is None:
            return False
        for message in process.poll():
            if "kernels" in message:
                job.kernels = done, kernels = message["kernels"][0], message["kernels"][1]
                if self.options.progress is not None:
                    self.options.progress(done, kernels)
        if process.foreign:  # this process was forked meanwhile: it starts a copy of its own if it goes on training
            job.process = None
            return False
        if process.result is None:
            return True
        key = next(k for k, each in self._compiling.items() if each is job)
        self._ended(key, job, process.result, time.monotonic() - process.started)
        return False

    def _ended(self, key: Any, job: Compiling, result: Mapping[str, Any], seconds: float) -> None:
        job.process = None
        if (error := result.get("break") or result.get("error")) is not None:
            self._in_pieces[key] = str(error)
            self.breaks.append(str(error))
            logs.event(logs.BREAKS, str(error))
            return
        job.ready = True
        how = "found in the cache" if result.get("warm") else "compiled"
        self._note(f"step {self.calls}: {how} in the background within {seconds:.1f} s")
        try:
            remember(self.options.cache, self._identity(key))
        except OSError as failure:
            self._note(f"later runs will not know of it: {message_of(failure)}")

    def _identity(self, key: Any) -> str:
        """What a run can know of a step without capturing it; equal ones are most often the same programs."""
        loss = getattr(self.loss, "__qualname__", type(self.loss).__qualname__)
        kinds = type(self.model).__module__, type(self.model).__qualname__, self.model.training
        options = str(self.options.pipeline), self.options.randomness, self.options.dynamic, self.keep_gradients
        trained = [p.requires_grad for p in self._parameters()]
        return repr((kinds, repr(self.model), loss, repr(self.optimizer), options, trained, key, self._gradients()))


__all__ = ["BackgroundStep", "When"]
