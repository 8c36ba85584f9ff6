"""A training step that is not one graph: which of its calls follow paths, and what their programs are bound to."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch._dynamo

from daceml_train import logs
from daceml_train.driver.bound_step import UNGUARDED, BoundStep
from daceml_train.driver.checking import kind_of, unstrided, watched
from daceml_train.driver.distribution import parallel_wrapper
from daceml_train.driver.faster import COSTLY, ENDLESS, NEW_KINDS_SLOWER, SLOWER, WARM_PATHS, Faster, NewKinds
from daceml_train.driver.goals import WholeStep
from daceml_train.driver.module import state_of
from daceml_train.driver.on_ranks import OnRanks
from daceml_train.driver.options import ScheduleKind
from daceml_train.driver.paths import Owner, Paths, unsuited
from daceml_train.driver.recursion import recursion_of
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.frontends.torch.dynamo.graph_breaks import REPEATED
from daceml_train.lowering.device import GPU, Device
from daceml_train.runtime.gpu.cuda_graph import CudaGraphs

KINDS = 2
"""Where so many kinds of arguments were not one program, and none was, further ones are not captured."""

CHANGES_BEFORE_PATHS = 3
"""How often a step may be captured again because of what it assigned, before its calls are followed along paths."""
OUTGROWN = 8
"""After so many calls along paths in a row, the programs that others of their kind ran are forgotten."""


def _compiled_by_others(module: torch.nn.Module) -> bool:
    """Whether a module's calls of PyTorch cannot be followed."""
    kinds = (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)
    return isinstance(module, kinds) or state_of(module) is not None or module._compiled_call_impl is not None


def _unsuited(leaf: Any) -> bool:
    """Whether an argument keeps a call from following paths."""
    return isinstance(leaf, torch.Tensor) and (type(leaf) is not torch.Tensor or leaf.requires_grad or not leaf.is_cpu)


class AlongPaths(OnRanks):
    """What a `TrainingStep` does where Python has to run its model."""

    _calls_itself = False
    """Whether the model calls itself over data."""
    whole_batches = True
    """Whether the step is one forward pass and one update."""
    fixed = False
    """Whether calls run in a way that depends on neither time nor earlier calls: in pieces, or as one program."""
    in_python = False
    """Whether PyTorch runs all calls of a step that is `fixed`: it changes Python objects that programs depend on."""
    schedule: ScheduleKind
    cuda_graphs: dict[Device, CudaGraphs]
    _steps: dict[Any, tuple[Captured, WholeStep]]
    _changed: dict[Any, str]
    unstable: Collection[str]
    _code: Any

    def _start_in_pieces(self) -> None:
        self.faster = Faster(compiled=None if self.whole_batches else True)
        self.along = Faster(warm=WARM_PATHS)
        """Whether calls along paths are faster than PyTorch: operators of a few elements may not be."""
        self.kinds = NewKinds()
        """Whether calls with sizes of their own are worth binding a program to them."""
        self.paths: dict[Any, Paths] = {}
        """Per number of threads, the ways through the user's code of calls that are not one program."""
        self._unbound: dict[Any, int] = {}
        """Per kind of arguments of which some calls are one program, how many were not."""
        self._without_paths: set[Any] = set()
        """The kinds of arguments whose graph could not be compiled."""

    def _along_a_path(
        self, key: Any, flat: Sequence[Any], inputs: Any, targets: tuple[Any, ...]
    ) -> torch.Tensor | None:
        """The loss of a call whose Python runs while programs compute; None where that is not possible."""
        if not self._has_paths or key in self._without_paths or REPEATED in self._in_pieces.get(key, ""):
            return None
        paths = self.paths.get(torch.get_num_threads())
        if paths is None:
            paths = self.paths[torch.get_num_threads()] = Paths(cast(Owner, self))
            paths.refused = unsuited(paths.owner)
        if paths.refused or any(map(_unsuited, flat)):
            return None
        misses, followed, start = paths.misses, self.along.takes_pieces(), time.thread_time()
        try:
            if followed:
                loss = paths.step(flat, inputs, targets)
                self._warn_of_paths(key, paths)
            else:
                loss = self._in_pytorch(key, inputs, targets)
            seconds = time.thread_time() - start
            if paths.misses == misses and self.along.ran(followed, seconds):
                paths.end(SLOWER)
            elif paths.misses == misses and followed:
                paths.costs.ran(seconds, self.along.best[False])
            return loss
        except Exception as error:
            if paths.calls == 1:
                self.paths.clear()
                self._at_fault(key, error, inputs, targets)
            raise
        finally:
            if paths.refused in (COSTLY, ENDLESS, SLOWER) and self.faster.compiled is None:
                self.faster.compiled = False
                self.breaks.append(paths.refused)

    def _run(self, key: Any, flat: Sequence[Any], bound: BoundStep | None, inputs: Any, targets: Any) -> torch.Tensor:
        """A step by the program that is bound for these arguments, along a path, or in pieces."""
        loss = None if bound is None else self._run_bound(key, flat, bound, inputs, targets)
        if loss is None and bound is None:
            loss = self._along_a_path(key, flat, inputs, targets)
        return self._run_in_pieces(key, inputs, targets) if loss is None else loss

    def _of_some_kind(
        self, key: Any, flat: Sequence[Any], bound: BoundStep | None, inputs: Any, targets: tuple[Any, ...]
    ) -> torch.Tensor:
        """A step whose sizes may be new; PyTorch runs it if nearly all are, and that is faster than binding."""
        start = time.thread_time()
        fixed = (
            self.fixed or not self.whole_batches or self.ranks is not None or any(p.is_cuda for p in self._parameters())
        )
        binds = fixed or self.kinds.binds(key if bound is None else None)
        new = bound is None or not binds
        if binds:
            bound = self._bind(key, inputs, targets, flat) if bound is None else bound
            loss = self._run(key, flat, bound, inputs, targets)
            new = new or (bound is not None and bound.new_sizes)
        else:
            loss = self._in_pytorch(key, inputs, targets)
        if self.kinds.ran(binds, new, time.thread_time() - start):
            self.breaks.append(NEW_KINDS_SLOWER)
            logs.event(logs.BREAKS, NEW_KINDS_SLOWER)
        return loss

    def _kind(self, flat: Sequence[Any], targets: int) -> tuple[Any, ...]:
        """The kind of a call, whose arguments are `flat`: what selects a bound step, besides the guards of Dynamo."""
        return self.idle, watched(), torch.get_num_threads(), targets, *map(kind_of, flat)

    def _refused(self, key: Any, flat: Sequence[Any]) -> Unsupported | None:
        """Why calls of a kind are neither one program nor a path, if that is known before they are traced."""
        refused = parallel_wrapper(self.model) or unstrided(flat)
        if isinstance(self.model, torch.jit.ScriptModule):
            refused = Unsupported("the model is compiled by torch.jit", advice="train the module that it was made of")
        if why := watched():
            refused = Unsupported(f"{why}, so PyTorch computes the gradients")
        if refused is not None:
            self._without_paths.add(key)
        return refused

    def _outgrown(self, key: Any) -> None:
        """Forget the programs of a kind of arguments that follows paths, if no call runs them any more."""
        if key in self._in_pieces and key in self._bound:
            self._unbound[key] = self._unbound.get(key, 0) + 1
            if self._unbound[key] >= OUTGROWN:
                del self._bound[key]

    def _warn_of_paths(self, key: Any, paths: Paths) -> None:
        """Warn once that and why Python runs the model, and of an internal error that has ended that."""
        why = self._in_pieces.get(key)
        if paths.failed and paths.refused not in self.breaks:
            self.breaks.append(paths.refused)
            self._warn_once(f"daceml_train runs a training step in pieces: {paths.refused}")
        elif why is not None and not paths.refused:
            self._warn_once(f"daceml_train runs a training step along paths, as Python takes them: {why}")

    @property
    def _has_paths(self) -> bool:
        """Whether calls may follow paths: not where the model calls itself over data, unless levels do not serve."""
        if self.fixed:
            return False  # a path is recorded in PyTorch where it is new, and is a program later
        if not self._may_follow or not self._calls_itself:
            return self._may_follow
        state = state_of(self.pieces) if self.pieces is not None else None
        recursion = state.recursions.get("forward") if state is not None else None
        return recursion is not None and not recursion.serves

    @functools.cached_property
    def _may_follow(self) -> bool:
        """Whether a step of this kind may follow paths at all."""
        model = self.model
        if parallel_wrapper(model) is not None or any(map(_compiled_by_others, self._modules())):
            return False
        return self.whole_batches and self.ranks is None and recursion_of(model, type(model).forward) is None

    @property
    def changes_itself(self) -> bool:
        """Whether calls have assigned Python objects that their programs depend on."""
        return any(self._changed.values())

    def forget_programs(self) -> None:
        """Link what was compiled once more at the next call, with the schedules that were found since."""
        self._bound.clear()
        self._steps.clear()

    def _names(self) -> dict[int, str]:
        """The names of parameters and buffers by their identity."""
        loss = self.loss if isinstance(self.loss, torch.nn.Module) else None
        roots = [("", self.model), *([("loss.", loss)] if loss is not None else [])]
        named = ((f"{p}{n}", t) for p, m in roots for n, t in (*m.named_parameters(), *m.named_buffers()))
        return {id(t): name for name, t in reversed(list(named))}

    def _python_runs(self) -> bool:
        """Whether Python runs the model, rather than code that TorchDynamo compiled."""
        return self.faster.compiled is False or any(not paths.refused for paths in self.paths.values())

    def _knows_kinds(self) -> bool:
        """Whether so many kinds of arguments were not one program that others will not be."""
        return self._has_paths and len(self._in_pieces) >= KINDS and not any(self._bound.values())

    def _allowed_changes(self, otherwise: int) -> int:
        """How often the step may be captured again because of what it assigned."""
        return CHANGES_BEFORE_PATHS if self._has_paths or self.fixed else otherwise

    def _by_pytorch(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """The step with nothing compiled but the update."""
        return self._in_pytorch(None, inputs, targets)

    def _bound_to(
        self,
        captured: Captured,
        step: WholeStep,
        by_name: Mapping[str, torch.Tensor],
        flat: Sequence[Any],
        manager: Any = UNGUARDED,
        scope: Mapping[str, Any] = types.MappingProxyType({}),
        effects: types.FunctionType | None = None,
        assigned: Collection[int] = (),
    ) -> BoundStep:
        return BoundStep(
            captured,
            step,
            manager,
            self._modules(),
            self.optimizer,
            by_name,
            flat,
            dict(scope),
            self._code.__globals__,
            effects,
            self.accumulated,
            self.bounds,
            self.scaler,
            self._new_cuda_graphs(step.executable.device),
            self.ranks,
            self.idle,
            assigned,
            self.unstable,
        )

    def _bind(self, key: Any, inputs: Any, targets: tuple[Any, ...], flat: Sequence[Any]) -> BoundStep | None:
        raise NotImplementedError

    def _new_cuda_graphs(self, device: Device) -> CudaGraphs | None:
        if self.schedule == "plain" or not isinstance(device, GPU):
            return None
        return self.cuda_graphs.setdefault(device, CudaGraphs(device))
