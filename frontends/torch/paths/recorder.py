"""While a model runs: its calls of PyTorch are followed along a trie of paths, and recorded where they leave it.

Following, no operator runs: a call that is the next step of a path returns tensors without data. Where user code looks
at a value, a program computes it. Where the call leaves all known paths, what was skipped runs in PyTorch, and the rest
of the call is recorded. Calls that depend on no parameter and on no earlier result run in PyTorch at once, and
so do Python, NumPy, and all random numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.tracing import reason
from daceml_train.frontends.torch.handlers import is_caught, may_fail
from daceml_train.frontends.torch.paths import functions, indices, random_functions
from daceml_train.frontends.torch.paths.functions import name_of
from daceml_train.frontends.torch.paths.looks import Looks
from daceml_train.frontends.torch.paths.sites import Site, Sites
from daceml_train.frontends.torch.paths.trie import (
    ARITHMETIC,
    Call,
    Number,
    Operand,
    Result,
    Step,
    alike,
    filled,
    leaves_of,
    template_of,
)
from daceml_train.frontends.torch.paths.values import (
    mapped,
    memory,
    mode,
    place,
    plain,
    plain_data,
    tensors,
)

Fetch = Callable[["Recorder", Result], Tensor | None]
"""Computes a result that user code looks at; None where nothing is compiled for it."""


class Recorder(Looks):
    """Follows or records the calls of one run of a model, from `root` on."""

    def __init__(self, root: Step, call: Call, held: Callable[[], set[int]], sites: Sites, fetch: Fetch | None) -> None:
        super().__init__()
        self.call, self.at, self.sites, self.fetch = call, root, sites, fetch
        self._find_held = held
        self.caller = sys._getframe(1).f_code
        self.following = fetch is not None
        """Whether operators are left out."""
        self.left = False
        """Whether the call has left the known paths."""
        self.foreign: set[int] = set()
        """Memory that is not PyTorch's."""
        self.untracked: set[int] = set()
        """Memory of results whose `data` was read: writes there are not seen by autograd."""
        self.stand_ins: dict[int, Result] = {}
        self.ways = 0
        """Into how many ways that differ in sizes or integers alone this call's path parts somewhere."""
        self.fresh: dict[int, Site] = {}
        """By their memory, where data that this call has allocated comes from."""
        self.selected: list[tuple[Any, Tensor, Any]] = []
        """Elements that are views in PyTorch and copies here, what they are elements of, and where."""
        self.refused = ""
        """Why calls like this one have no path."""
        self.again = False
        """Whether that holds for this call alone: later ones follow some line of the user's otherwise."""
        self.before_backward: Callable[[], None] | None = None
        """What is done before gradients are computed that PyTorch adds up, once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    # ---- calls --------------------------------------------------------------------------------------------------
    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function: of the next step, of a program, or of PyTorch."""
        if functions.reads_attribute(function, args):
            return self._attribute(function, function.__self__.__name__, *args)
        if function in indices.INDEXING:
            args = self._indexed(function, *args)
        return self._run(function, args, kwargs)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lazy: bool = False) -> Any:
        if self.following and not mode():
            call, enabled = self.call, torch.is_grad_enabled()
            for step in self.at.following:
                if step.matches(function, enabled, args, kwargs, call):
                    return self._followed(step)
        if not lazy and not self._lazy(function, args, kwargs):
            return self._at_once(function, args, kwargs)
        if function is Tensor.backward:
            self.begin_backward()
        if self.refused:
            return function(*self._real(args), **self._real(kwargs))
        return self._by_kind(function, args, kwargs)

    def begin_backward(self) -> None:
        """Do what is done before gradients are computed, unless it was."""
        if self.before_backward is not None:
            self.before_backward()
            self.before_backward = None

    def _at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What depends on data alone; where the user's line changes it with a result, a copy of it is a result."""
        found = function(*args, **kwargs)
        if function in functions.SHARING:
            self.foreign.add(memory(found))
        elif not plain_data(found) or self.refused:
            return found
        else:
            if self.sites.changes(function):
                return self._run(Tensor.clone, (found,), {}, True)
            where, given = memory(found), {memory(t) for t in tensors((args, kwargs))}
            if where not in given and where not in self.foreign:
                self.fresh[where] = self.sites.of(function)
        return found

    def _indexed(self, function: Any, x: Any, index: Any, *value: Any) -> tuple[Any, ...]:
        """The arguments of an index with lists, arrays, and integers that change as tensors."""
        index = indices.as_data(index)
        if self.sites.varies(function):
            if function is Tensor.__getitem__:
                return x, indices.integers_as_data(x, index)
            value = tuple(torch.tensor(v, dtype=x.dtype) if isinstance(v, int) else v for v in value)
        return x, index, *value

    def _by_kind(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is Tensor.new and (size := functions.size_of_new(*args[1:], **kwargs)) is not None:
            function, args, kwargs = Tensor.new_empty, (args[0], size), {}
        name = name_of(function)
        if name in functions.REFUSED or (may_fail(name, args) and is_caught(self.caller)):
            self.refuse(f"a call of {name}" if name in functions.REFUSED else f"an error of {name} that is caught")
            return function(*self._real(args), **self._real(kwargs))
        if function is Tensor.__iter__:
            return iter(self.run(torch.unbind, args, {}))
        if function in functions.QUESTIONS:
            return function(*args, **kwargs)
        if function in functions.DROPOUTS:
            try:
                return self._dropout(*functions.dropped(function, *args, **kwargs))
            except Unsupported as error:
                self.refuse(str(error))
                return function(*self._real(args), **self._real(kwargs))
        body = random_functions.body_of(function)
        if body is not None and random_functions.draws(function, kwargs, args):
            with self:
                return body(*args, **kwargs)
        if function in functions.LIKE and not (function is torch.full_like and tensors(args[1:])):
            return self._at_once(function, (self._like(args[0]), *args[1:]), kwargs)
        if function is Tensor.__getitem__ and (at := indices.scalar_index(args[1])) is not None:
            found = indices.selected(self.run, args[0], args[1], at)
            self.selected.append((found, args[0], self.sites.of(function)))
            return found
        if function is Tensor.__getitem__ and (index := indices.without_masks(self.run, args[1])) is not args[1]:
            return self.run(function, (args[0], index), {})
        if function in functions.LOOKS or function in self.sites.looks:
            return self._look(function, args, kwargs)
        self.leave()
        return self._recorded(function, args, kwargs)

    def _attribute(self, function: Any, name: str, tensor: Tensor) -> Any:
        if not tensor.is_meta:
            result = self.known.get(id(tensor))
            if result is None or name in functions.METADATA or name in functions.ON_DEVICE:
                return function(tensor)
            self.refuse(f"a look at {name} of a result")
            return function(tensor)
        if name in functions.METADATA and name != "requires_grad":
            return function(tensor)
        result = self.stands_for(tensor)
        if name == "requires_grad" and not (result is not None and result.grown):
            return function(tensor)
        if result is not None and name in functions.ON_DEVICE:
            return functions.on_device(name, result.device)
        self.leave()
        self.refuse(f"a look at {name} of a result")
        return function(self._real(tensor))

    def _lazy(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call depends on a result, on a parameter, or on what the step changes."""
        enabled, known, pending = torch.is_grad_enabled(), self.known, self.pending
        given = tensors((args, kwargs))
        if function is Tensor.detach and not given[0].is_leaf and not given[0].is_meta and id(given[0]) not in known:
            return False  # what an earlier step has computed
        for t in given:
            if t.is_meta or id(t) in known or (enabled and t.requires_grad) or (pending and memory(t) in pending):
                return True
        if given and (functions.in_place(name_of(function)) or "out" in kwargs):
            used = {memory(t) for t in self.call.operands}
            return any(memory(t) in used for t in given)
        return False

    def _followed(self, step: Step) -> Any:
        self.at = step
        self.call.path.append(step)
        if self.call.generalized:
            self.leave()
            return self._returned(step, self.values.__getitem__)
        if step.written:
            self.pending.update(memory(self.call.operands[operand.index]) for operand in step.written)
        if step.mutates:
            self.values.clear()
        if self.foreign and step.operands:
            self._copy_foreign(step)
        if type(step.result) is Result:
            return step.result.tensor
        return self._returned(step, lambda result: result.tensor)

    def _copy_foreign(self, step: Step) -> None:
        """Keep the present values of operands that NumPy may change."""
        for operand in step.operands:
            tensor = self.call.operands[operand.index]
            if memory(tensor) in self.foreign:
                self.call.copies[operand.index] = tensor.clone(memory_format=torch.preserve_format)

    def _returned(self, step: Step, tensor: Callable[[Result], Tensor]) -> Any:
        """What a step returns, of these tensors for its results."""

        def leaf(entry: Any) -> Any:
            return tensor(entry) if type(entry) is Result else self.call.operands[entry.index]

        found = filled(step.result, leaf)
        return found if step.rebuild is None else step.rebuild(found)

    # ---- leaving the known paths --------------------------------------------------------------------------------
    def leave(self) -> None:
        """Compute in PyTorch what was left out, and go on recording."""
        if not self.following:
            return
        self.following, self.left = False, True
        for step in self.call.path:
            for result in step.results:
                self.stand_ins[id(result.tensor)] = result
        for step in self.call.path:
            # a refusal may come from outside of a call's handler
            with torch._C.DisableTorchFunction(), torch.set_grad_enabled(step.enabled):
                found = step.function(*filled(step.arguments, self._value), **filled(step.keywords, self._value))
            self._note(step, found)

    def _value(self, leaf: Any) -> Any:
        if type(leaf) is Result:
            return self.values[leaf]
        return self.call.operands[leaf.index] if type(leaf) is Operand else self.call.numbers[leaf]

    def _note(self, step: Step, found: Any) -> None:
        """Note what PyTorch returned for a step. Raises `Unsupported` where sizes or types differ."""
        if type(step.function) is functions.GETTER and step.function.__self__.__name__ == "data":
            self.untracked.add(memory(found))
        for leaf, value in zip(leaves_of(step.result), leaves_of(plain(found)), strict=True):
            if type(leaf) is not Result:
                continue
            stand_in = leaf.tensor
            if value.shape != stand_in.shape or value.dtype != stand_in.dtype or value.stride() != stand_in.stride():
                raise Unsupported(f"results of {name_of(step.function)} whose sizes depend on data")
            if value.requires_grad != leaf.requires_grad and not leaf.grown:
                raise Unsupported(f"results of {name_of(step.function)} that require a gradient now and then")
            self.values[leaf] = value
            self.known[id(value)] = leaf
            self.stand_ins[id(leaf.tensor)] = leaf

    def stands_for(self, tensor: Any) -> Result | None:
        """The result for which a tensor without data stands."""
        found = self.stand_ins.get(id(tensor))
        if found is None and self.following:
            for step in reversed(self.call.path):
                for result in step.results:
                    if result.tensor is tensor:
                        return result
        return found

    def _real(self, value: Any) -> Any:
        """An argument with computed tensors in place of those that stand for them."""
        if not self.left:
            return value

        def real(tensor: Tensor) -> Tensor:
            result = self.stand_ins.get(id(tensor)) if tensor.is_meta else None
            return tensor if result is None else self.values[result]

        return mapped(value, real)

    # ---- recording ----------------------------------------------------------------------------------------------
    def refuse(self, reason: str) -> None:
        """Compute the rest of the call in PyTorch, and let calls like it follow no path."""
        self.leave()
        self.refused = self.refused or f"{reason}{place()}"

    def _recorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._real(args), self._real(kwargs)
        call, enabled = self.call, torch.is_grad_enabled()
        try:
            if special := mode():
                raise Unsupported(special)
            normal = mapped(args, self._stand_in), mapped(kwargs, self._stand_in)
            step = next((s for s in self.at.following if s.matches(function, enabled, *normal, call)), None)
            created = None if step is not None else self._new(function, enabled, *normal)
        except Exception as error:
            self.refuse(reason(error, ours=True))
            return function(*args, **kwargs)
        call.generalized = False
        operands = tensors((args, kwargs))
        versions = [t._version for t in operands]
        found = function(*args, **kwargs)
        try:
            if created is not None:
                if not self._complete(created, found, operands, versions):
                    self.sites.looks.add(function)
                    self._noted(tensors((args, kwargs)), found)
                    return found
                self.at.following.append(created)
                self.ways = max(self.ways, ways := alike(created, self.at.following))
                if ways > 1 and indices.has_integers(function, args):
                    self.again = self.sites.vary(function) or self.again
                step = created
            assert step is not None
            self.at = step
            call.path.append(step)
            self._note(step, found)
            self.pending.update(memory(call.operands[operand.index]) for operand in step.written)
        except Exception as error:
            self.refuse(reason(error, ours=True))
        return found

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor in the trie."""
        result = self.known.get(id(tensor))
        if result is None:
            return tensor
        if tensor.requires_grad != result.requires_grad and not result.grown:
            raise Unsupported("a result of an autograd.Function")
        return result.tensor

    @functools.cached_property
    def held(self) -> set[int]:
        """The identities of what the model holds."""
        return self._find_held()

    def _new(self, function: Any, enabled: bool, args: Any, kwargs: Any) -> Step:
        hooked = enabled and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        step = Step(function, enabled, where=place(), checkpointed=hooked)

        def tensor(t: Tensor) -> Any:
            if (result := self.stand_ins.get(id(t))) is not None:
                return result
            new = id(t) not in self.call.index
            created = memory(t) in self.fresh and id(t) not in self.held
            operand = Operand(self.call.bind(t), t, new and not created and (id(t) in self.held or t.requires_grad))
            if type(t) not in (Tensor, torch.nn.Parameter) or t.layout is not torch.strided or t.is_inference():
                raise Unsupported(f"an operand of type {type(t).__name__} and layout {t.layout}")
            if t.requires_grad and id(t) in self.call.arguments:
                raise Unsupported("an argument that requires a gradient")
            if t.requires_grad and not t.is_leaf:
                raise Unsupported("a tensor that carries a gradient from before the step")
            if new and id(t) not in self.held and any(memory(v) == memory(t) for v in self.values.values()):
                raise Unsupported("a tensor that is made of a result in a way that is not seen")
            if new and self.pending and memory(t) in self.pending:
                raise Unsupported("a part of a tensor that the step changes in place")
            if new:
                step.operands.append(operand)
            return operand

        def number(value: float) -> Number:
            found = Number(value)
            step.numbers.append(found)
            self.call.numbers[found] = value
            return found

        integers = name_of(function) in ARITHMETIC
        step.arguments = tuple(template_of(a, tensor, number, integers) for a in args)
        step.keywords = template_of(kwargs, tensor, number, integers)
        return step

    def _complete(self, step: Step, found: Any, operands: Sequence[Tensor], versions: Sequence[int]) -> bool:
        """Describe what a new step returns; false if that is no tensor, so that it looked at values."""
        whole = plain(found)
        step.rebuild = None if whole is found else type(found)
        leaves = list(leaves_of(whole))
        if any(not isinstance(leaf, Tensor | None) for leaf in leaves):
            return False
        by_position = {operand.index: operand for s in (*self.call.path, step) for operand in s.operands}
        for tensor, version in zip(operands, versions, strict=True):
            if tensor._version == version:
                continue
            if memory(tensor) in self.untracked:
                raise Unsupported("a result that changes after its data was read")
            if id(tensor) in self.known:
                self._changed(memory(tensor))
                step.mutates = True
                continue
            if id(tensor) in self.call.arguments:
                raise Unsupported("a model that changes its argument in place")
            if memory(tensor) in self.fresh:
                self.sites.change(self.fresh[memory(tensor)])
                self.again = True
            operand = by_position[self.call.index[id(tensor)]]
            if sum(memory(t) == memory(tensor) for t in self.call.operands) > 1:
                raise Unsupported("a model that changes memory of several of its operands in place")
            operand.held, operand.tensor = True, tensor
            step.written.append(operand)

        def leaf(tensor: Tensor) -> Any:
            if (result := self.known.get(id(tensor))) is not None:
                return result
            if (position := self.call.index.get(id(tensor))) is not None:
                return Operand(position, tensor, True)
            return Result(tensor)

        step.result = mapped(whole, leaf)
        step.results = tuple(r for r in leaves_of(step.result) if type(r) is Result and r not in self.values)
        return True

    def _changed(self, changed: int) -> None:
        """Note that results in this memory have changed in place. Raises `Unsupported` where an element would have to
        change with what it is an element of.
        """
        for result, value in self.values.items():
            if value.requires_grad and not result.requires_grad and memory(value) == changed:
                result.grown = result.requires_grad = True
        for element, whole, site in self.selected:
            if changed in (memory(self._real(element)), memory(self._real(whole))):
                self.again = self.sites.fix(site) or self.again
                raise Unsupported("an element at a position that changes, which shares memory")

    # ---- rules --------------------------------------------------------------------------------------------------
    def _dropout(self, x: Tensor, p: float, drops: bool, inplace: bool, dimensions: int) -> Any:
        if not drops:
            return x
        with torch.no_grad():
            mask = functions.noise(self._like(x), float(p), dimensions)
        return self.run(Tensor.mul_ if inplace else Tensor.mul, (x, mask), {})

    def _like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same sizes and type, without its values."""
        if not tensor.is_meta:
            return tensor.detach()
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


__all__ = ["Fetch", "Recorder"]
