"""What is taken from inside PyTorch: each private name that this package uses, by what it is used for.

PyTorch may change these names in any minor release, so `pyproject.toml` admits one after its tests (`make
test-versions`). The first use of this package, and `daceml-train doctor`, name what a PyTorch lacks.
`tests/architecture/test_internals.py` holds the table against the sources.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

TAKEN: Mapping[str, tuple[str, ...]] = {
    "TorchDynamo: tracing, guards and the code that it generates": (
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._C._dynamo.guards.GlobalStateGuard",
        "torch._C._is_tracing",
        "torch._TorchCompileWrapper",
        "torch._C._dynamo.guards.profile_guard_manager",
        "torch._dynamo.OptimizedModule",
        "torch._dynamo.compiled_autograd",
        "torch._dynamo.config.compiled_autograd",
        "torch._dynamo.config.patch",
        "torch._dynamo.config.skip_nnmodule_hook_guards",
        "torch._dynamo.convert_frame",
        "torch._dynamo.decorators",
        "torch._dynamo.disable",
        "torch._dynamo.config.get_config_copy",
        "torch._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._dynamo.eval_frame.cached_backends",
        "torch._dynamo.exc.BackendCompilerFailed",
        "torch._dynamo.exc.ShortenTraceback",
        "torch._dynamo.exc.SkipFrame",
        "torch._dynamo.exc.TensorifyScalarRestartAnalysis",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.exc.TorchRuntimeError",
        "torch._dynamo.exc.UserError",
        "torch._dynamo.guards.CheckFunctionManager",
        "torch._dynamo.guards.ShapeCodeParts",
        "torch._dynamo.guards._get_closure_vars",
        "torch._dynamo.guards.convert_int_to_concrete_values",
        "torch._dynamo.mutation_guard.install_generation_tagging_init",
        "torch._dynamo.output_graph.OutputGraph",
        "torch._dynamo.output_graph.OutputGraphGuardsState",
        "torch._dynamo.pgo",
        "torch._dynamo.reset",
        "torch._dynamo.source.AttrSource",
        "torch._dynamo.source.ConstantSource",
        "torch._dynamo.source.get_global_source_name",
        "torch._dynamo.source.get_local_source_name",
        "torch._dynamo.trace_rules.check",
        "torch._dynamo.utils.get_metrics_context",
        "torch._dynamo.utils.numpy_method_wrapper",
        "torch._dynamo.utils.numpy_operator_wrapper",
        "torch._guards.CompileContext",
        "torch._guards.Guard",
        "torch._guards.Source",
        "torch._guards.TracingContext",
        "torch._guards.detect_fake_mode",
        "torch.fx._lazy_graph_module._LazyGraphModule",
        "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
        "torch.fx.experimental._config",
        "torch.fx.experimental.symbolic_shapes._ShapeGuardsHelper",
        "torch.fx.graph_module._loader",
    ),
    "TorchDynamo: what it cannot trace, taught to it": (
        "torch._dynamo.allow_in_graph",
        "torch._dynamo.bytecode_transformation.create_call_function",
        "torch._dynamo.bytecode_transformation.create_call_method",
        "torch._dynamo.bytecode_transformation.create_instruction",
        "torch._dynamo.codegen.PyCodegen",
        "torch._dynamo.exc.unimplemented",
        "torch._dynamo.external_utils",
        "torch._dynamo.graph_break",
        "torch._dynamo.graph_break_hints",
        "torch._dynamo.guards.GuardBuilder",
        "torch._dynamo.guards.install_guard",
        "torch._dynamo.output_graph.SubgraphTracer",
        "torch._dynamo.side_effects.SideEffects",
        "torch._dynamo.source.GetItemSource",
        "torch._dynamo.source.LocalSource",
        "torch._dynamo.source.RandomValueSource",
        "torch._dynamo.source.TypeDictSource",
        "torch._dynamo.substitute_in_graph",
        "torch._dynamo.symbolic_convert.InstructionTranslator",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
        "torch._dynamo.symbolic_convert.compare_op_handlers",
        "torch._dynamo.trace_rules.get_torch_obj_rule_map",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._dynamo.variables.AutogradFunctionVariable",
        "torch._dynamo.variables.TensorVariable",
        "torch._dynamo.variables.TorchInGraphFunctionVariable",
        "torch._dynamo.variables.UserDefinedClassVariable",
        "torch._dynamo.variables.UserFunctionVariable",
        "torch._dynamo.variables.VariableTracker",
        "torch._dynamo.variables.builder.VariableBuilder",
        "torch._dynamo.variables.builtin.BuiltinVariable",
        "torch._dynamo.variables.constant.ConstantVariable",
        "torch._dynamo.variables.dicts",
        "torch._dynamo.variables.functions.LocalGeneratorObjectVariable",
        "torch._dynamo.variables.functions.NestedUserFunctionVariable",
        "torch._dynamo.variables.functions.SkipFunctionVariable",
        "torch._dynamo.variables.functions.UserFunctionVariable",
        "torch._dynamo.variables.functions.WrapperUserFunctionVariable",
        "torch._dynamo.variables.functions.UserMethodVariable",
        "torch._dynamo.variables.higher_order_ops",
        "torch._dynamo.variables.lazy.LazyVariableTracker",
        "torch._dynamo.variables.lists.CommonListMethodsVariable",
        "torch._dynamo.variables.lists.DequeVariable",
        "torch._dynamo.variables.lists.ListVariable",
        "torch._dynamo.utils.numpy_to_tensor_wrapper",
        "torch._dynamo.variables.tensor.NumpyNdarrayVariable",
        "torch._numpy._dtypes_impl",
        "torch._numpy._normalizations",
        "torch._dynamo.variables.misc.DebuggingVariable",
        "torch._dynamo.variables.misc.LoggingLoggerVariable",
        "torch._dynamo.variables.misc.NumpyVariable",
        "torch._dynamo.variables.misc.StringFormatVariable",
        "torch._dynamo.variables.nn_module.NNModuleVariable",
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable",
        "torch._dynamo.variables.tensor.SymNodeVariable",
        "torch._dynamo.variables.tensor.TensorVariable",
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable",
        "torch.autograd.grad_mode._enter_inference_mode",
        "torch.autograd.grad_mode._exit_inference_mode",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode",
        "torch.fx.experimental.proxy_tensor.handle_sym_dispatch",
        "torch.fx.experimental.sym_node.SymNode",
        "torch.nn.modules.batchnorm._BatchNorm.forward",
        "torch.utils._sympy.printers.PythonPrinter",
        "torch.utils._sympy.symbol.SymT",
        "torch.utils._sympy.symbol.symbol_is_type",
    ),
    "capture: a graph of ATen operators with symbolic sizes": (
        "torch._C.DisableTorchFunction",
        "torch._C.DispatchKey.Functionalize",
        "torch._C.ScriptFunction",
        "torch._C.ScriptMethod",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._dispatch_keys",
        "torch._C._enter_dual_level",
        "torch._C._exit_dual_level",
        "torch._C._functorch.get_dynamic_layer_stack_depth",
        "torch._C._functorch.get_unwrapped",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
        "torch._C._get_mkldnn_enabled",
        "torch._C._is_any_autocast_enabled",
        "torch._C._is_fwd_grad_enabled",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._len_torch_function_stack",
        "torch._C._nn.linear",
        "torch._C._set_fwd_grad_enabled",
        "torch._C._set_grad_enabled",
        "torch._C._set_mkldnn_enabled",
        "torch._as_tensor_fullprec",
        "torch._assert_async",
        "torch._check",
        "torch._decomp.core_aten_decompositions",
        "torch._decomp.decompositions.upsample_compute_output_size",
        "torch._dispatch.python.enable_python_dispatcher",
        "torch._dispatch.python.no_python_dispatcher",
        "torch._dynamo.utils.preserve_rng_state",
        "torch._functorch._aot_autograd.functional_utils.from_fun",
        "torch._functorch._aot_autograd.functional_utils.has_data_mutation",
        "torch._functorch._aot_autograd.functional_utils.has_metadata_mutation",
        "torch._functorch._aot_autograd.functional_utils.to_fun",
        "torch._functorch.aot_autograd.aot_export_joint_simple",
        "torch._functorch.aot_autograd.aot_export_module",
        "torch._functorch.aot_autograd.aot_module_simplified",
        "torch._higher_order_ops.scan.scan",
        "torch._higher_order_ops.while_loop.while_loop",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch._ops._OpNamespace",
        "torch._ops._Ops",
        "torch._subclasses.FakeTensor",
        "torch._subclasses.FakeTensorMode",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.functional_tensor.FunctionalTensorMode",
        "torch.fx.experimental.proxy_tensor.make_fx",
        "torch.fx.experimental.proxy_tensor.maybe_enable_thunkify",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext",
        "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols",
        "torch.fx.experimental.symbolic_shapes.guard_float",
        "torch.fx.experimental.symbolic_shapes.guard_int",
        "torch.overrides._get_current_function_mode_stack",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch._functorch.eager_transforms",
        "torch._functorch.utils",
        "torch._functorch.vmap",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._sympy.functions.FloorDiv",
        "torch.utils._sympy.functions.Mod",
        "torch.utils._sympy.functions.PythonMod",
    ),
    "several processes: collectives of models, models in fully_shard": (
        "torch.distributed._functional_collectives",
        "torch._library.fake_class_registry.FakeScriptObject",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
        "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state",
    ),
    "running: autograd, versions of tensors, hooks, results without a copy": (
        "torch._C.DispatchKey.ADInplaceOrView",
        "torch._C.DispatchKeySet",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._current_graph_task_id",
        "torch._C._autograd._profiler_enabled",
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._autograd._unsafe_set_version_counter",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._vmapmode_decrement_nesting",
        "torch._C._vmapmode_increment_nesting",
        "torch._add_batch_dim",
        "torch._is_zerotensor",
        "torch._neg_view",
        "torch._remove_batch_dim",
        "torch.autograd.forward_ad._current_level",
        "torch.autograd.function._SingleLevelFunction",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
    ),
}
ON_A_GPU: tuple[str, ...] = (
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._cuda_endAllocateToPool",
    "torch._C._cuda_releasePool",
    "torch._C._get_blas_preferred_backend",
    "torch._C._get_linalg_preferred_backend",
)
"""Taken where a program runs on a GPU; a CPU build of PyTorch may lack them."""


def exists(name: str) -> bool:
    """Whether PyTorch has a name, as a module or in one."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def missing() -> dict[str, str]:
    """The names that the installed PyTorch lacks, each with what it is used for."""
    return {name: purpose for purpose, names in TAKEN.items() for name in names if not exists(name)}


def refusal() -> str:
    """What to say where the installed PyTorch lacks a name; empty if it lacks none."""
    lacking = missing()
    if not lacking:
        return ""
    version = importlib.import_module("torch").__version__
    names = "; ".join(f"{name} ({purpose})" for name, purpose in lacking.items())
    return (
        f"daceml_train does not fit PyTorch {version}, which lacks {names}; pyproject.toml lists the versions it fits"
    )


__all__ = ["ON_A_GPU", "TAKEN", "exists", "missing", "refusal"]
