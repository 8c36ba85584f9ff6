"""A training step of which several ranks each take a part: what `mesh=`, `shard=` and `sparse=` add to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from daceml_train.analysis.links import Link
from daceml_train.driver.checking import check_flag
from daceml_train.driver.distribution import begin_as_equals, begin_step, check_loaded, rows_of, send_buffers
from daceml_train.driver.drift import Changes, check_embeddings, drift, drift_in_pieces, drift_of_loss
from daceml_train.driver.fully_sharded import FullySharded, make_state
from daceml_train.driver.module import state_of
from daceml_train.driver.pieces import InPieces
from daceml_train.driver.sharded_embedding import ShardedEmbedding, sharded_embeddings
from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.ops.collective import shard_size
from daceml_train.ops.embedding import Embedding, EmbeddingBag
from daceml_train.passes.base import Pass
from daceml_train.passes.pipeline import Pipeline
from daceml_train.runtime.ranks import Ranks
from daceml_train.tensor import hint
from daceml_train.training.gradients import GradientOptions
from daceml_train.training.joint import ACCUMULATED
from daceml_train.training.optimizers import SCALARS, initial_state, makes_its_state, ready, update_of
from daceml_train.transformations.distribution.bucket import BUCKET, Bucket
from daceml_train.transformations.distribution.choose_rows import ChooseRows
from daceml_train.transformations.distribution.shard_optimizer import ShardOptimizer

Sharding = Literal["optimizer"] | None
"""What is divided among the ranks: the optimizer's state, or nothing."""
Sparse = Literal["auto", "dense", "gather"]
"""How gradients of embedding tables are exchanged: as dense arrays, as the rows that each rank has, or as the one that
sends fewer bytes.
"""

LEVEL = "distribution"
"""The level of passes that say how sums over the ranks travel."""
COUNTED = ("sum_rows", "lookup_rows", "return_rows")
"""Collectives whose bytes depend on data: they are counted in each step."""


@dataclass(frozen=True)
class Sharing:
    """What the ranks of a step share: see `training_step`."""

    ranks: Ranks | None = None
    shard: Sharding = None
    sparse: Sparse = "auto"
    sync_batch_norm: bool = False
    bucket: int | Link = BUCKET
    wrapper: DistributedDataParallel | FullySharded | None = None
    """What contains the model."""

    @property
    def sharded(self) -> FullySharded | None:
        """The model in `fully_shard`."""
        return self.wrapper if isinstance(self.wrapper, FullySharded) else None

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("shard", self.shard, (None, "optimizer")),
            ("sparse", self.sparse, get_args(Sparse)),
        ):
            if value not in kinds:
                words = ", ".join(repr(kind) for kind in kinds)
                raise Invalid(f"{name} is one of {words}, given {value!r}")
        check_flag("sync_batch_norm", self.sync_batch_norm)
        number = isinstance(self.bucket, int) and not isinstance(self.bucket, bool) and self.bucket >= 1
        if not number and not isinstance(self.bucket, Link):
            raise Invalid(f"bucket is a positive number of bytes, given {self.bucket!r}")

    def passes(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline, whose level `distribution` does what was asked for; defaults leave it as it is."""
        if self.shard == "optimizer" and not _has(pipeline, ShardOptimizer):
            place = Bucket if _has(pipeline, Bucket) else None
            pipeline = pipeline.before(place, ShardOptimizer()) if place else pipeline.after(LEVEL, ShardOptimizer())
        if self.sparse != "auto":
            pipeline = pipeline if _has(pipeline, ChooseRows) else pipeline.before(LEVEL, ChooseRows())
            pipeline = pipeline.with_options(ChooseRows, how=self.sparse)
        if self.bucket != BUCKET:
            pipeline = pipeline if _has(pipeline, Bucket) else pipeline.after(LEVEL, Bucket())
            link = self.bucket if isinstance(self.bucket, Link) else None
            options = {"size": self.bucket} if link is None else {"alpha": link.alpha, "bandwidth": link.bandwidth}
            pipeline = pipeline.with_options(Bucket, **options)
        return pipeline


def _has(pipeline: Pipeline, kind: type[Pass]) -> bool:
    return any(isinstance(p, kind) for p in pipeline.level(LEVEL))


class OnRanks(InPieces):
    """What a `TrainingStep` does for the ranks that train together."""

    sharing = Sharing()
    idle = False
    """Whether this rank has no data in the step that is running."""
    accumulated: dict[int, torch.Tensor]
    _bound: dict[Any, Any]
    _tables: tuple[tuple[str, int], ...] = ()
    """The inputs of the captured graph that are tables, and the most rows of each that any rank reads."""
    _drift: str = ""
    """Why ranks would not keep equal parameters."""
    _seen = 0
    """The graphs of a model in pieces that were looked at for that."""
    _divided_inputs: tuple[str, ...] = ()
    """The inputs of the captured graph that are parameters in `fully_shard`."""
    _rows_read: dict[int, int] | None = None
    """The most rows of each table that any rank reads, by the table's identity, once the ranks have told each other."""

    def train_on(self, sharing: Sharing, options: Mapping[str, Any]) -> None:
        """Train with these ranks, which must have the same `options`; all begin with what the first one has."""
        self.sharing, self.ranks = sharing, sharing.ranks
        self._check_divided()
        if self.ranks is None:
            return
        check_embeddings(self.model, self.loss)
        modules = [m for m in (self.model, self.loss) if isinstance(m, nn.Module)]
        told = {**options, **{f.name: getattr(sharing, f.name) for f in fields(sharing)}}
        del told["ranks"], told["wrapper"]
        told["passes"] = ", ".join(map(str, self.options.pipeline.level(LEVEL)))
        told["scaler"] = None if self.scaler is None else self.scaler.state_dict()
        divided = {*self._divided(), *(sharing.sharded.ids if sharing.sharded else ())}
        begin_as_equals(self.ranks, modules, self.optimizer, told, self.shards, divided)

    def _divided(self) -> dict[int, ShardedEmbedding]:
        """The embeddings whose tables are divided among the ranks, by the identity of their parameters."""
        return sharded_embeddings(self.model, self.loss)

    def _check_divided(self) -> None:
        """Raise `Invalid` for a table that is divided among other ranks."""
        for embedding in self._divided().values():
            if self.ranks is None or embedding.group_name != self.ranks.group.group_name:
                advice = "pass mesh=, the one that the table is divided over"
                raise Invalid("a ShardedEmbedding trains in a step of its own ranks", advice=advice)

    @property
    def shards(self) -> bool:
        """Whether each rank has a shard of the optimizer's state."""
        return self.ranks is not None and _has(self.options.pipeline, ShardOptimizer)

    @property
    def network(self) -> dict[str, int]:
        """Bytes that each rank sends per step in the collectives of the last compiled program, by their kind.

        Where they depend on data, they are those of this rank's last step.
        """
        found: dict[str, int] = {}
        for record in reversed(self.records):
            for cost in record.costs:
                if isinstance(cost.network, int) and cost.network and cost.operators not in COUNTED:
                    kind = cost.operators.removeprefix("start ")
                    found[kind] = found.get(kind, 0) + cost.network
            if found:
                break
        for (name, _), sent in self.ranks.sent.items() if self.ranks else ():
            found[name] = found.get(name, 0) + sent
        return found

    def gradient_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients that a step exchanges as dense arrays, and of the rows that each rank sends."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        tables = {id(p) for p in parameters if self._gathers(p, (self._rows_read or {}).get(id(p), 0))}
        sent = sum(self.ranks.sent.values()) // (self.ranks.size - 1) if self.ranks is not None else 0
        return sum(p.nbytes for p in parameters if id(p) not in tables), sent

    # ---- a step -------------------------------------------------------------------------------------------------
    def _step(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        if (ranks := self.ranks) is None:
            return self._local_step(inputs, targets)
        try:
            with ranks.step():
                begin_step(self.sharing.wrapper)
                self.idle = not rows_of(pytree.tree_leaves((inputs, targets)))
                step = self._step_without_data if self.idle else self._local_step
                with self.sharing.sharded.in_step() if self.sharing.sharded else contextlib.nullcontext():
                    loss = step(inputs, targets)
        except BaseException:
            if not ranks.settled:  # another rank may not have chosen
                self._rows_read = None
                self._bound.clear()
            raise
        finally:
            self.idle, self._overwritten = False, ()
        ranks.settled = self._rows_read is not None
        return loss

    def _run_in_pieces(self, key: Any, inputs: Any, targets: Sequence[Any]) -> torch.Tensor:
        """As of any step; a model in `fully_shard` then trains by PyTorch's hooks, on all ranks."""
        if (sharded := self.sharing.sharded) is not None and self.ranks is not None:
            self.ranks.begin("a step in pieces, see its `breaks`", rows_of(pytree.tree_leaves((inputs, targets))))
            self.ranks.agreed()
            self.model, self.ranks, self.sharing = sharded.model, None, Sharing()
            self._bound.clear()
        return super()._run_in_pieces(key, inputs, targets)

    def _loss_in_pieces(self, key: Any, inputs: Any, targets: Sequence[Any], compiled: bool = True) -> torch.Tensor:
        changes = Changes(self._parameters() if self.ranks is not None else ())
        loss = None if self._drift else super()._loss_in_pieces(key, inputs, targets, compiled)
        self._overwritten = sorted({*self._overwritten, *changes.numbers()})
        if self.ranks is not None and loss is not None:
            state = state_of(self.pieces)
            if state is not None and state.backend.graphs != self._seen:
                self._drift, self._seen = drift_in_pieces(state.backend), state.backend.graphs
            self._drift = self._drift or drift_of_loss(loss)
        if self._drift or loss is None:
            raise Invalid(self._drift)
        return loss

    def _step_without_data(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """Take part in the collectives and in the update, with gradients that are zero.

        What is captured needs rows, of which nothing is computed.
        """
        assert self.ranks is not None
        rows = max(self.ranks.largest, 2)

        def filled(leaf: Any) -> Any:
            empty = isinstance(leaf, torch.Tensor) and leaf.ndim and not leaf.shape[0]
            return leaf.new_zeros((rows, *leaf.shape[1:])) if empty else leaf

        inputs, targets = pytree.tree_map(filled, (inputs, targets))
        key, flat, bound = self._find(inputs, targets)
        if bound is None:
            raise Unsupported(f"a rank without data, in a step that runs in pieces: {self.breaks[-1]}")
        if bound.step.further:
            raise Unsupported("a rank without data, whose model keeps results of its batch in Python objects")
        loss = self._run_bound(key, flat, bound, inputs, targets)
        assert loss is not None
        return loss

    def _local_step(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        raise NotImplementedError

    def _find(self, inputs: Any, targets: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        raise NotImplementedError

    def _run_bound(self, key: Any, flat: Any, bound: Any, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor | None:
        raise NotImplementedError

    def _update_in_pieces(self, rows: int) -> None:
        if self.sharing.sync_batch_norm:
            raise Unsupported(f"sync_batch_norm in a step that runs in pieces; {self.breaks[-1]}")
        if self.shards:
            raise Unsupported(f"shard='optimizer' divides the state of a step that is one program; {self.breaks[-1]}")
        if self._divided():
            raise Unsupported(f"a ShardedEmbedding in a step that runs in pieces; {self.breaks[-1]}")
        super()._update_in_pieces(rows)

    # ---- what programs are compiled for -------------------------------------------------------------------------
    def _gradients(self) -> GradientOptions:
        found = super()._gradients()
        if self.ranks is None:
            return found
        sync = self.sharing.sync_batch_norm
        found = replace(found, shard=self.shards, sync_batch_norm=sync)
        return replace(found, rows=self._tables, idle=self.idle, parameters=self._divided_inputs)

    def _capturing(self) -> Any:
        """A context in which the model can be captured."""
        return self.sharing.sharded.captured() if self.sharing.sharded else contextlib.nullcontext()

    def _tensors_of(self, found: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Graph input -> tensor; of parameters in `fully_shard` those that are divided."""
        if (sharded := self.sharing.sharded) is not None:
            found = {name: sharded.parameters.get(id(t), t) for name, t in found.items()}
            self._divided_inputs = tuple(name for name, t in found.items() if isinstance(t, DTensor))
        return found

    def _choose_tables(self, graph: Graph, by_name: Mapping[str, torch.Tensor]) -> None:
        """Find the tables of whose gradients rows may be exchanged, and how many rows any rank reads.

        All ranks tell each other in the first step that succeeds, if that is what their choice depends on.
        """
        self._check_changes(graph, by_name)
        self._tables = ()
        choosing = next((p for p in self.options.pipeline.level(LEVEL) if isinstance(p, ChooseRows)), None)
        if self.ranks is None or choosing is None or choosing.how == "dense":
            return
        read = {name: rows for name, rows in rows_read(graph).items() if name not in self._divided_inputs}
        tables = {name: rows for name, rows in read.items() if by_name[name].requires_grad}
        if self._rows_read is None:
            most = dict(tables)
            if choosing.how == "auto":
                paths = {graph.inputs[name].path or name: name for name in tables}
                for text in self.ranks.tell("tables", json.dumps({p: tables[n] for p, n in paths.items()})):
                    for path, rows in json.loads(text or "{}").items():
                        if path in paths:
                            most[paths[path]] = max(most[paths[path]], rows)
            self._rows_read = {id(by_name[n]): rows for n, rows in most.items()}
        known = ((name, self._rows_read.get(id(by_name[name]), 0)) for name in tables)
        self._tables = tuple(sorted((name, rows) for name, rows in known if rows))

    def _check_changes(self, graph: Graph, by_name: Mapping[str, torch.Tensor]) -> None:
        """Refuse a model that changes a parameter, or scales its gradient, by what is in the batch, which differs by
        rank: in pieces, too.
        """
        if self.ranks is not None and (why := drift(graph, lambda name: by_name[name].requires_grad)):
            self._drift = why
            raise Unsupported(why)

    def _gathers(self, table: torch.Tensor, rows: int) -> bool:
        """Whether rows of a table's gradient are exchanged if each rank reads so many of them."""
        choosing = next((p for p in self.options.pipeline.level(LEVEL) if isinstance(p, ChooseRows)), None)
        if self.ranks is None or choosing is None or not rows:
            return False
        return choosing.gathers(table.shape[0], table[0].nbytes, rows, self.ranks.size)

    # ---- the optimizer's state ----------------------------------------------------------------------------------
    def _make_state(self, parameter: torch.Tensor, name: str) -> None:
        if name == ACCUMULATED:
            self.accumulated.setdefault(id(parameter), torch.zeros_like(parameter.detach()))
            return
        if isinstance(parameter, DTensor):
            make_state(parameter, name, self.optimizer)
            return
        state = self.optimizer.state[parameter]
        whole = not self.shards or self.ranks is None or not parameter.ndim or id(parameter) in self._divided()
        size = None if whole or self.ranks is None else shard_size(parameter.shape, self.ranks.size)
        if not isinstance(state.get(name), torch.Tensor):
            state[name] = initial_state(name, parameter, self.optimizer, size)
        elif size is not None and name not in SCALARS and state[name].shape != (size,):
            state[name] = self._own_shard(state[name], parameter, name)
        if state[name].device != parameter.device:  # a count of steps, which PyTorch keeps on the CPU
            state[name] = state[name].to(parameter.device)

    def _own_shard(self, whole: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's shard of a state that all ranks have."""
        assert self.ranks is not None
        if whole.shape != parameter.shape:
            raise Invalid(
                f"the optimizer's {name} of a parameter {list(parameter.shape)} is {list(whole.shape)}, which is "
                f"neither the whole of it nor a shard for {self.ranks.size} ranks",
                advice="load checkpoints of other numbers of ranks through step.state_dict()",
            )
        size = shard_size(parameter.shape, self.ranks.size)
        shard = whole.new_zeros(size)
        own = whole.reshape(-1)[self.ranks.rank * size : (self.ranks.rank + 1) * size]
        shard[: len(own)] = own
        return shard

    # ---- checkpoints --------------------------------------------------------------------------------------------
    @property
    def _given(self) -> nn.Module:
        """The model as the user has it."""
        return self.sharing.sharded.model if self.sharing.sharded else self.model

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, and scaler, for `torch.distributed.checkpoint`, which loads them on any number of ranks.

        State that is sharded is a `DTensor`. Entries of the optimizer's state are flat, and made where the first step
        would make them. Only rank 0 has buffers: those of other ranks may differ.
        """
        model = self._whole(self._given.state_dict())
        if self.ranks is not None and self.ranks.rank:
            for name, _ in self._given.named_buffers(remove_duplicate=False):
                model.pop(name, None)
        found: dict[str, Any] = {"model": model, "state": {}}
        for key, parameter, name, tensor in self._states():
            found["state"].setdefault(key, {})[name] = self._distributed(tensor, parameter, name)
        groups = self.optimizer.param_groups
        found["options"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, on any number of ranks, which all call this.

        Raises `Invalid`, before anything is loaded, for what a step with another optimizer returned.
        """
        entries = list(self._states())
        check_loaded(state, len(self.optimizer.param_groups), ((key, name) for key, _, name, _ in entries))
        whole = self._whole(self._given.state_dict())
        local = {name: value for name, value in state["model"].items() if not isinstance(whole.get(name), DTensor)}
        strict = len(local) == len(state["model"]) and (self.ranks is None or not self.ranks.rank)
        self._given.load_state_dict(local, strict=strict)
        for name in state["model"].keys() - local.keys():
            whole[name].to_local().copy_(state["model"][name].to_local())
        for key, parameter, name, tensor in entries:
            given = state["state"][key][name]
            own = self._distributed(tensor, parameter, name)
            if isinstance(own, DTensor) and not isinstance(given, DTensor):  # the whole of it
                tensor.copy_(self._own_shard(given.view(parameter.shape), parameter, name))
            elif isinstance(own, DTensor):
                own.to_local().copy_(given.to_local())
            else:
                tensor.copy_(given.view(tensor.shape))
        for group, options in zip(self.optimizer.param_groups, state["options"], strict=True):
            group.update(options)
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        if self.ranks is not None:
            send_buffers(self.ranks, self._given)

    def _states(self) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
        """The name of each parameter, the parameter, and the name and tensor of each entry of its state."""
        names = {id(p): name for name, p in self._given.named_parameters()}
        number = 0
        for group in self.optimizer.param_groups:
            update = update_of(self.optimizer, group)
            for parameter in group["params"]:
                key, number = names.get(id(parameter), f"parameter {number}"), number + 1
                missing = not ready(update, self.optimizer.state.get(parameter, {}))
                if not parameter.requires_grad or (missing and makes_its_state(update)):
                    continue
                for name in update.state:
                    self._make_state(parameter, name)
                    yield key, parameter, name, self.optimizer.state[parameter][name]

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """A model's state with divided tables as one tensor of all ranks each."""
        divided, names = self._divided(), self._given.named_parameters(remove_duplicate=False)
        return state | {name: divided[id(p)].whole() for name, p in names if id(p) in divided}

    def _distributed(self, tensor: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
        if name in SCALARS or isinstance(tensor, DTensor):
            return tensor
        if (embedding := self._divided().get(id(parameter))) is not None:
            return embedding.whole(tensor)
        if not self.shards or not parameter.ndim:
            return tensor.reshape(-1)
        assert self.ranks is not None
        size, length = len(tensor), parameter.numel()
        own = tensor[: max(0, min(size, length - self.ranks.rank * size))]
        mesh = self.ranks.mesh
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size([length]), stride=(1,))


def rows_read(graph: Graph) -> dict[str, int]:
    """The inputs that are read as tables of embeddings and in no other way, and how many of their rows are read."""
    found: dict[str, int] = {}
    readers = graph.readers()
    for name in graph.inputs:
        nodes = readers[name]
        tables = all(isinstance(n.op, Embedding | EmbeddingBag) and name not in n.inputs[1:] for n in nodes)
        if nodes and tables and name not in graph.outputs and name not in graph.writes:
            found[name] = sum(int(hint(graph.tensors[node.inputs[1]].size)) for node in nodes)
    return found
