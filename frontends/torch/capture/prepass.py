"""The gradient-aware pre-pass: it runs Dynamo's graph so that a trace without autograd keeps what gradients depend on.

Lost without it, each silently: `detach` and `no_grad` regions, the backward of a user's `autograd.Function`,
`torch.func.grad` (all zeros under `no_grad`), gradients through in-place changes under `no_grad`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from daceml_train.errors import DacemlError, Unsupported
from daceml_train.frontends.torch.capture import gradient_hooks, graph_leaves, inner_gradients, number_operands
from daceml_train.frontends.torch.capture.checkpointed import refuse_absent_gradients, refuse_repeated_changes
from daceml_train.frontends.torch.capture.composed import REPLACED, REPLACED_IN_FUNCTORCH, REPLACED_METHODS
from daceml_train.frontends.torch.capture.control import CONTROL, control_of
from daceml_train.frontends.torch.capture.nodes import changed_in_place, name_of, storage_of
from daceml_train.frontends.torch.capture.operators import CustomFunction, custom_functions, result_counts
from daceml_train.frontends.torch.capture.refusals import refusal
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.overlap import refuse_lost_writes
from daceml_train.frontends.torch.results import example_of

MARK = "daceml_train"
"""Key of the pre-pass in `meta["custom"]` of traced nodes: `detach` (by the user) or `functorch` (in `torch.func`)."""

_INLINED = frozenset({"wrap", "invoke_subgraph", "tag_activation_checkpoint", "hints_wrapper"})
_REFUSED = frozenset({"register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "backward"})
_ASSERTION = "INTERNAL ASSERT FAILED"
"""In what PyTorch says of its own mistakes, which asks the reader to report them."""
_ops = torch.ops.daceml_train


class GradientAware(nn.Module):
    """A module whose forward runs the graph of `module` node by node under the rules above."""

    def __init__(self, module: fx.GraphModule, grad_enabled: bool, further: Sequence[fx.Node] = ()) -> None:
        super().__init__()
        self._further = tuple(further)
        self._hidden = (module,)  # not a submodule: `capture` passes its tensors explicitly
        self._grad_enabled = grad_enabled

    def forward(self, attributes: dict[str, torch.Tensor], *operands: Any) -> tuple[Any, ...]:
        (module,) = self._hidden
        state = _State(self._grad_enabled)
        with fx_traceback.preserve_node_meta(), nn.utils.stateless._reparametrize_module(module, attributes):
            interpreter = _Interpreter(module, state)
            result = interpreter.run(*operands)
        leaves = pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None)
        return (*leaves, *(interpreter.env[node] for node in self._further))


class _State:
    """State shared by a graph and the bodies inside it."""

    def __init__(self, grad_enabled: bool) -> None:
        self.grad_enabled = grad_enabled
        self.nesting = 0
        """How many transformations of `torch.func` are active."""
        self.outside: list[bool] = []
        """Whether gradients were enabled where each `torch.func.grad` among them began."""


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, state: _State) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.state = state
        self.node: fx.Node
        self.carriers: dict[int, list[tuple[fx.Node, torch.Tensor]]] = {}
        """Memory -> the examples in it that have a gradient, and their nodes, in order."""
        self.hooks: dict[fx.Node, tuple[torch.Tensor, list[tuple[int, tuple[Any, ...]]]]] = {}
        """A tensor with hooks -> the tensor before the first of them, and the hooks: their keys, and what they read."""
        self.masks: dict[fx.Node, torch.Tensor | None] = dict.fromkeys(inner_gradients.masked(module.graph))
        """Dropouts that inner gradients differentiate -> their masks, once these are drawn."""

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        refuse_lost_writes(n, changed_in_place(n))
        if n.op in ("call_function", "call_method") and (
            said := refusal(n.target, *self.fetch_args_kwargs_from_env(n))
        ):
            raise Unsupported(
                f"{name_of(n.target)} of element types that PyTorch refuses: {said}", where=str(origin(n))
            )
        try:
            result = super().run_node(n)
        except DacemlError:
            raise
        except Exception as error:
            line = str(error).strip().splitlines()
            why = f": {line[0] if line else type(error).__name__}"
            message = f"{name_of(n.target)} cannot be traced{'' if _ASSERTION in why else why}"
            raise Unsupported(message, where=str(origin(n))) from error
        example = example_of(n)
        if isinstance(example, torch.Tensor) and example.requires_grad:
            storage = storage_of(example)
            if storage is not None:
                self.carriers.setdefault(storage, []).append((n, example))
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch._C._set_grad_enabled:
            self.state.grad_enabled = bool(args[0])
            return None
        if target is torch.autograd.grad_mode._enter_inference_mode:
            before, self.state.grad_enabled = self.state.grad_enabled, not args[0]
            return before
        if target is torch.autograd.grad_mode._exit_inference_mode:
            self.state.grad_enabled = args[0]
            return None
        name = name_of(target)
        if target is torch.autograd.grad:
            return self._inner_gradients()
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(name, args, kwargs)
        if name in _REFUSED:
            raise Unsupported(f"{name} inside a compiled graph", where=str(origin(self.node)))
        if name == "_grad_increment_nesting" or name == "_vmap_increment_nesting":
            self.state.nesting += 1
        if name == "_grad_increment_nesting":
            self.state.outside.append(self.state.grad_enabled)
        rule = REPLACED.get(target) if not self.state.nesting else REPLACED_IN_FUNCTORCH.get(target)
        function: Callable[..., Any] = self._dropout if self.node in self.masks else rule or target
        result = self._under_grad_mode(lambda: function(*args, **kwargs), args, kwargs)
        if name == "_grad_decrement_nesting" or name == "_vmap_decrement_nesting":
            self.state.nesting -= 1
        if name == "_grad_decrement_nesting":
            self.state.outside.pop()
        if name == "_unwrap_for_grad" and not [self.state.grad_enabled, *self.state.outside][-1]:
            # what it came from enables gradients for itself alone
            return pytree.tree_map_only(torch.Tensor, lambda t: _detached(t, False), result)
        return result

    def _dropout(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A dropout with the mask that it has drawn, or draws."""
        function: Any = self.node.target
        result, self.masks[self.node] = inner_gradients.dropped(function, args, kwargs, self.masks[self.node])
        return result

    def _inner_gradients(self) -> Any:
        """`torch.autograd.grad`; without `create_graph` no gradient flows through its result."""
        node, self.state.nesting = self.node, self.state.nesting + 1
        enabled, self.state.grad_enabled = self.state.grad_enabled, True
        try:
            with torch.enable_grad(), fx_traceback.annotate({MARK: "functorch"}):
                found = inner_gradients.gradients(node, self.env, self._again)
        finally:
            self.state.nesting -= 1
            self.state.grad_enabled = enabled
            self.node = node
        if inner_gradients.creates_graph(node):
            return found
        with fx_traceback.annotate({MARK: "detach"}):
            return tuple(None if g is None else g.detach() for g in found)

    def _again(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """The result of a node with these values of the others."""
        if node.target is torch.autograd.grad:
            return inner_gradients.gradients(node, values, self._again)
        given = inner_gradients.without_statistics(node)
        args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, given)
        self.node = node
        result = getattr(self, node.op)(node.target, tuple(args), kwargs)
        leaves, structure = pytree.tree_flatten(result)
        examples = pytree.tree_leaves(example_of(node))
        if len(examples) != len(leaves):
            raise Unsupported(f"a gradient inside a graph through {node.format_node()}", where=str(origin(node)))
        with fx_traceback.annotate({MARK: "detach"}):
            results = [
                leaf.detach() if isinstance(e, torch.Tensor) and e.is_floating_point() and not e.requires_grad else leaf
                for leaf, e in zip(leaves, examples, strict=True)
            ]
        return pytree.tree_unflatten(results, structure)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if graph_leaves.marks_leaf(self.node):
            return args[0]
        if target in _REFUSED:
            raise Unsupported(f"{target} inside a compiled graph", where=str(origin(self.node)))
        rule = REPLACED_METHODS.get(target) if not self.state.nesting else None
        call: Callable[[], Any] = lambda: super(_Interpreter, self).call_method(target, args, kwargs)  # noqa: E731
        if rule is not None:
            function = rule
            call = lambda: function(*args, **kwargs)  # noqa: E731
        return self._under_grad_mode(call, args, kwargs)

    def _under_grad_mode(self, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if name_of(self.node.target) == "detach_" and not self.state.nesting:
            return self._detached_in_place()
        if name_of(self.node.target) in ("detach", "detach_", "_get_data_attr"):
            with fx_traceback.annotate({MARK: "detach"}):
                return call()
        if self.state.nesting:
            with torch.enable_grad(), fx_traceback.annotate({MARK: "functorch"}):
                result = call()
            if self.state.grad_enabled or name_of(self.node.target).startswith("_"):  # which compute nothing
                return result
            return pytree.tree_map_only(torch.Tensor, lambda t: _detached(t, False), result)
        if self.state.grad_enabled:
            with self._grafted_where_detached(), self._overwritten():
                return call()
        with self._grafted():
            result = call()
        changed = changed_in_place(self.node)
        if changed is not None and isinstance(result, torch.Tensor):
            return self.env[changed]  # the tensor itself, with the gradient that it has
        element = self.node.target is operator.getitem and not isinstance(args[0], torch.Tensor)
        if element or not any(_carries_gradient(operand) for operand in self.node.all_input_nodes):
            return result
        taken = {storage_of(e) for n in self.node.all_input_nodes for e in pytree.tree_leaves(example_of(n))}
        leaves, structure = pytree.tree_flatten(result)
        examples = pytree.tree_leaves(example_of(self.node))
        if len(examples) != len(leaves):
            examples = [None] * len(leaves)
        results = [
            _detached(t, storage_of(e) not in taken) if isinstance(t, torch.Tensor) else t
            for t, e in zip(leaves, examples, strict=True)
        ]
        return pytree.tree_unflatten(results, structure)

    def _detached_in_place(self) -> torch.Tensor:
        """`x.detach_()`: no gradient for later uses of the tensor, by any of its names; earlier ones keep theirs."""
        node = self.node.all_input_nodes[0]
        example, x = example_of(node), self.env[node]
        others = (other for other in node.graph.nodes if name_of(other.target) != "detach_")
        written = {storage_of(example_of(n)) for other in others if (n := changed_in_place(other)) is not None}
        if node.op != "placeholder" and storage_of(example) in written:
            raise Unsupported("detach_ of a tensor that is changed in place, too", where=str(origin(self.node)))
        result = _detached(x, False)
        for name, value in self.env.items():
            if value is x or example_of(name) is example:
                self.env[name] = result
        return result

    @contextlib.contextmanager
    def _grafted(self) -> Iterator[None]:
        """An in-place change with gradients off: values change, derivatives do not.

        The owner of the memory keeps its derivative; memory without one gets none from the written values.
        """
        changed = changed_in_place(self.node)
        owner = self._gradient_owner(changed) if changed is not None else None
        if changed is None:
            yield
        elif owner is not None:
            tensor = self.env[owner]
            before = tensor.clone()
            yield
            tensor.copy_(_ops.graft(before, tensor.clone()))
        else:
            yield
            tensor = self.env[changed]
            if isinstance(tensor, torch.Tensor) and any(_carries_gradient(n) for n in self.node.all_input_nodes):
                with fx_traceback.annotate({MARK: "detach"}):
                    tensor.copy_(tensor.detach())

    @contextlib.contextmanager
    def _grafted_where_detached(self) -> Iterator[None]:
        """An in-place change through `x.detach()` or `x.data`: the values of `x` change, its derivative does not."""
        changed = changed_in_place(self.node)
        example = example_of(changed) if changed is not None else None
        if changed is None or not isinstance(example, torch.Tensor) or not self._is_detached(changed):
            yield
            return
        if example.requires_grad:
            raise Unsupported(
                "an in-place change of a detached tensor by values that have a gradient", where=str(origin(self.node))
            )
        with self._grafted():
            yield

    @contextlib.contextmanager
    def _overwritten(self) -> Iterator[None]:
        """Values that are replaced in place have a gradient of zeros in PyTorch, rather than none."""
        changed = changed_in_place(self.node)
        tensor = self.env[changed] if changed is not None else None
        if (
            not isinstance(tensor, torch.Tensor)
            or not (tensor.is_floating_point() or tensor.is_complex())
            or name_of(self.node.target) not in _REPLACING
            or changed is None
            or not _carries_gradient(changed)
        ):
            yield
            return
        before = tensor.clone()
        yield
        tensor.copy_(_ops.overwrite(before, tensor.clone()))

    def _is_detached(self, changed: fx.Node) -> bool:
        """Whether memory that has a gradient is changed through a tensor that autograd does not connect with it."""
        example = example_of(changed)
        storage = storage_of(example)
        if storage is None or example.is_inference():
            return False
        base = example if example._base is None else example._base
        owners = (x if x._base is None else x._base for _, x in self.carriers.get(storage, ()))
        return any(owner is not base and owner.requires_grad for owner in owners)

    def _gradient_owner(self, changed: fx.Node) -> fx.Node | None:
        """The base tensor with a gradient whose memory `changed` shares; None where no such tensor is known."""
        storage = storage_of(example_of(changed))
        owners = self.carriers.get(storage, ()) if storage is not None else ()
        for node, example in owners:
            if example._base is None:
                return node
        if owners:
            raise Unsupported(
                "an in-place change under no_grad of a view that has a gradient", where=str(origin(self.node))
            )
        return None

    def _higher_order(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "autograd_function_apply":
            return self._custom_function(args, kwargs)
        if name in CONTROL:
            return self._control(name, args)
        if name == "register_hook":
            return self._hooked(*args)
        bodies = [a for a in args if isinstance(a, fx.GraphModule)]
        if name in _INLINED and len(bodies) == 1:
            if name == "tag_activation_checkpoint" and self.state.grad_enabled:
                refuse_repeated_changes(bodies[0], changed_in_place)
                given = [example_of(n) for n in self.node.all_input_nodes]
                refuse_absent_gradients(given, kwargs, str(origin(self.node)))
            operands = [a for a in args if not isinstance(a, fx.GraphModule | str)]
            return _Interpreter(bodies[0], self.state).run(*operands)
        raise Unsupported(f"the higher-order operator {name}", where=str(origin(self.node)))

    def _hooked(self, x: torch.Tensor, body: fx.GraphModule, *free: Any) -> torch.Tensor:
        """The tensor with a hook on its gradient, which all later uses see under either name."""
        gradient_hooks.refuse_unhookable(self.node, changed_in_place)
        if self.state.nesting or not all(isinstance(f, torch.Tensor) for f in free):
            why = "inside torch.func" if self.state.nesting else "that reads sizes"
            raise Unsupported(f"register_hook {why}", where=str(origin(self.node)))
        functions, tensor = custom_functions.get(), self.node.all_input_nodes[0]
        functions.append(gradient_hooks.hooked(body, len(free)))
        result, earlier = self.hooks.get(tensor, (x, []))
        hooks = [*earlier, (len(functions) - 1, free)]
        self.hooks[self.node] = result, hooks
        for key, read in reversed(hooks):  # the first hook gets the gradient first
            result = _ops.custom_vjp(key, [result, *read])[0]
        self.env[tensor] = result
        return result

    def _control(self, name: str, args: tuple[Any, ...]) -> Any:
        """A branch or loop, as one operator over the tensors among its operands; a known condition needs no branch."""
        where = str(origin(self.node))
        if self.state.nesting:
            raise Unsupported(f"{name} inside torch.func", where=where)
        if name == "cond" and not isinstance(args[0], torch.Tensor):
            return _Interpreter(args[1] if args[0] else args[2], self.state).run(*args[3])
        control = control_of(name, args, example_of(self.node), self.state.grad_enabled, where)
        functions = custom_functions.get()
        functions.append(control)
        first = [args[0].reshape(())] if name == "cond" else []
        tensors = [x for x in control.operands if isinstance(x, torch.Tensor)]
        results: list[torch.Tensor] = _ops.control(len(functions) - 1, [*first, *tensors])
        if not self.state.grad_enabled:
            results = [_detached(r, True) for r in results]
        return tuple(results)

    def _custom_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward, backward, operands = number_operands.as_tensors(args[0], args[1], args[2:])
        where = str(origin(self.node))
        if kwargs.get("dirty_idx"):
            raise Unsupported("an autograd.Function that changes its input in place", where=where)
        if self.state.nesting:
            raise Unsupported("an autograd.Function inside torch.func", where=where)
        if not all(isinstance(a, torch.Tensor) for a in operands):
            raise Unsupported("an autograd.Function with operands that are not tensors", where=where)
        function = CustomFunction(forward, backward)
        count, several = result_counts(function)
        functions = custom_functions.get()
        functions.append(function)
        results = _ops.custom_vjp(len(functions) - 1, operands)[:count]
        without = kwargs.get("non_differentiable_idx", ())
        off = not self.state.grad_enabled
        results = [_detached(r, True) if off or i in without else r for i, r in enumerate(results)]
        return tuple(results) if several else results[0]


def _detached(x: torch.Tensor, own: bool) -> torch.Tensor:
    """`x` without its gradient; in memory of its `own`, it gets the gradients of what is written to it later."""
    with fx_traceback.annotate({MARK: "detach"}):
        result = x.detach()
        return result.clone() if own else result


def _carries_gradient(node: fx.Node) -> bool:
    """Whether this value requires a gradient according to Dynamo; true if unknown.

    The example of a tensor that `detach_` changes says what holds at the end.
    """
    example = example_of(node)
    if example is None or any(name_of(user.target) == "detach_" for user in node.users):
        return True
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(example))


_OVERWRITING = "zero fill copy uniform normal random bernoulli exponential log_normal cauchy geometric"
_REPLACING = frozenset(("setitem", *(f"{name}_" for name in _OVERWRITING.split())))
"""In-place changes that overwrite all old values."""
