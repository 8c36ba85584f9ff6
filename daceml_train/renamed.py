"""Names that have changed: old ones are still understood, each with a `DeprecationWarning`, until version 0.2.

Passes in saved pipelines and sessions are read under both names; old modules are importable through an import hook
(`install`), which looks at nothing but what no finder has found.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ROOT = "daceml_train."

PASSES = {
    "accumulate_products": "accumulate_matmuls",
    "attend_in_strips": "blocked_attention",
    "concatenate_products": "concatenate_matmuls",
    "convolve_by_product": "convolution_as_matmul",
    "factor_products": "factor_matmuls",
    "fuse_into_product": "fuse_matmul_epilogue",
    "hoist_products": "hoist_matmuls",
    "merge_equal": "common_subexpressions",
    "pack_products": "pack_weights",
    "recognise_attention": "recognize_attention",
    "recompute": "rematerialize",
    "recompute_cheap": "rematerialize_cheap",
    "store_kept": "compress_saved",
    "transpose_product": "transpose_matmul",
    "update_in_parts": "chunk_updates",
}
"""Old name of a pass, as texts of pipelines have it -> its name."""

MODULES = {
    "backends.aten": "lowering.aten",
    "backends.functions": "runtime.gpu.functions",
    "codegen.arrays": "codegen.kernel.arrays",
    "codegen.columns": "codegen.library.im2col",
    "codegen.compile": "codegen.cpu.compile",
    "codegen.depthwise": "codegen.library.depthwise",
    "codegen.domain": "codegen.kernel.domain",
    "codegen.expression": "codegen.kernel.expression",
    "codegen.launch": "codegen.cpu.launch",
    "codegen.loops": "codegen.kernel.loops",
    "codegen.parts": "codegen.cpu.emitter",
    "codegen.phases": "codegen.kernel.staging",
    "codegen.plan": "codegen.kernel.plan",
    "codegen.products": "codegen.library.matmul_epilogue",
    "codegen.rows": "codegen.library.index_add",
    "codegen.schedule": "codegen.cpu.schedule",
    "codegen.sdfg": "codegen.cpu.sdfg",
    "codegen.source": "codegen.cpu.source",
    "codegen.templates": "codegen.library.templates",
    "codegen.values": "codegen.kernel.values",
    "codegen.written": "codegen.library.launch",
    "dace_transformations": "sdfg.transformations",
    "driver.joint": "training.joint",
    "driver.looking": "driver.capture_only",
    "driver.observation": "driver.dump",
    "driver.preparation": "driver.prepacked",
    "driver.recomputed": "driver.rematerialized",
    "driver.record": "driver.records",
    "driver.sparse": "training.sparse_gradients",
    "driver.tracing": "frontends.torch.dynamo.tracing",
    "exploration.comparison": "exploration.session.comparison",
    "exploration.eager": "exploration.session.eager_copy",
    "exploration.export": "exploration.export.page",
    "exploration.export_picture": "exploration.export.picture",
    "exploration.history": "exploration.session.history",
    "exploration.lineage": "exploration.session.lineage",
    "exploration.listing": "exploration.session.listing",
    "exploration.measurement": "exploration.session.measurement",
    "exploration.program": "exploration.session.program",
    "exploration.saving": "exploration.session.saving",
    "exploration.session": "exploration.session.session",
    "exploration.state": "exploration.session.state",
    "exploration.steps": "exploration.session.steps",
    "exploration.subject": "exploration.session.subject",
    "exploration.verification": "exploration.session.verification",
    "exploration.view": "exploration.views.view",
    "exploration.view_details": "exploration.views.details",
    "exploration.view_kept": "exploration.views.saved",
    "exploration.view_modules": "exploration.views.modules",
    "exploration.view_sdfg": "exploration.views.sdfg",
    "exploration.view_times": "exploration.views.times",
    "exploration.view_tree": "exploration.views.tree",
    "exploration.widget": "exploration.widget.explorer",
    "exploration.widget_data": "exploration.widget.data",
    "exploration.widget_opening": "exploration.widget.opening",
    "exploration.widget_requests": "exploration.widget.requests",
    "exploration.widget_viewer": "exploration.widget.viewer",
    "exploration.widget_work": "exploration.widget.work",
    "frontends.torch.autograd_function": "frontends.torch.capture.autograd_function",
    "frontends.torch.capture": "frontends.torch.capture.capture",
    "frontends.torch.control": "frontends.torch.capture.control",
    "frontends.torch.control_flow": "frontends.torch.capture.control_flow",
    "frontends.torch.decompositions": "frontends.torch.capture.decompositions",
    "frontends.torch.draws": "frontends.torch.capture.rng_draws",
    "frontends.torch.eager": "frontends.torch.capture.eager_traffic",
    "frontends.torch.fallback": "frontends.torch.rules.fallback",
    "frontends.torch.indexing": "frontends.torch.rules.indexing",
    "frontends.torch.inner_gradients": "frontends.torch.capture.inner_gradients",
    "frontends.torch.linear_algebra": "frontends.torch.rules.linear_algebra",
    "frontends.torch.movement": "frontends.torch.rules.movement",
    "frontends.torch.names": "frontends.torch.rules.table",
    "frontends.torch.network": "frontends.torch.rules.network",
    "frontends.torch.operators": "frontends.torch.capture.operators",
    "frontends.torch.own_leaves": "frontends.torch.capture.graph_leaves",
    "frontends.torch.pointwise": "frontends.torch.rules.pointwise",
    "frontends.torch.polyfills": "frontends.torch.dynamo.polyfills",
    "frontends.torch.prepass": "frontends.torch.capture.prepass",
    "frontends.torch.reductions": "frontends.torch.rules.reductions",
    "frontends.torch.requirements": "frontends.torch.capture.requirements",
    "frontends.torch.source": "frontends.torch.dynamo.origin",
    "frontends.torch.trace": "frontends.torch.capture.trace",
    "frontends.torch.translate": "frontends.torch.rules.translate",
    "graph.aliases": "analysis.aliases",
    "graph.interpret": "analysis.interpret",
    "graph.memory": "analysis.memory",
    "graph.parts": "analysis.chunks",
    "graph.phases": "analysis.phases",
    "graph.pieces": "analysis.concat_aliases",
    "graph.prologue": "analysis.weights_only",
    "graph.sdfg": "sdfg.convert",
    "graph.sdfg_regions": "sdfg.regions",
    "graph.sizes": "analysis.sizes",
    "graph.traffic": "analysis.traffic",
    "graph.verify": "analysis.verify",
    "runtime.cost": "lowering.cost",
    "runtime.cuda_device": "runtime.gpu.cuda",
    "runtime.cuda_toolchain": "runtime.gpu.toolchain",
    "runtime.device": "lowering.device",
    "runtime.device_arena": "runtime.gpu.arena",
    "runtime.device_binding": "runtime.gpu.binding",
    "runtime.device_control": "runtime.gpu.control",
    "runtime.device_plan": "runtime.gpu.plan",
    "runtime.footprint": "lowering.footprint",
    "runtime.gradients": "training.gradients",
    "runtime.kernel_search": "runtime.gpu.autotune",
    "runtime.lowering": "lowering.lower",
    "runtime.memory": "lowering.arena",
    "runtime.optimizers": "training.optimizers",
    "runtime.packing": "runtime.prepack",
    "runtime.pair_recording": "runtime.gpu.cuda_graph_pair",
    "runtime.parts": "lowering.chunks",
    "runtime.products": "runtime.tune_matmul",
    "runtime.program": "lowering.program",
    "runtime.recording": "runtime.gpu.cuda_graph",
    "runtime.streams": "lowering.streams",
    "transformations.global_movement.again": "transformations.global_movement.rematerialized_graph",
    "transformations.global_movement.live": "transformations.global_movement.liveness",
    "transformations.global_movement.merge_equal": "transformations.global_movement.common_subexpressions",
    "transformations.global_movement.narrow": "transformations.global_movement.region_dead_code",
    "transformations.global_movement.recompute": "transformations.global_movement.rematerialize",
    "transformations.global_movement.recompute_cheap": "transformations.global_movement.rematerialize_cheap",
    "transformations.global_movement.runs": "transformations.global_movement.remat_costs",
    "transformations.global_movement.spans": "transformations.global_movement.live_ranges",
    "transformations.global_movement.stages": "transformations.global_movement.remat_plan",
    "transformations.global_movement.store_kept": "transformations.fusion.compress_saved",
    "transformations.global_movement.update_in_parts": "transformations.global_movement.chunk_updates",
    "transformations.intra_operator.accumulate_products": "transformations.intra_operator.accumulate_matmuls",
    "transformations.intra_operator.attend_in_strips": "transformations.forward.blocked_attention",
    "transformations.intra_operator.concatenate_products": "transformations.intra_operator.concatenate_matmuls",
    "transformations.intra_operator.cross_entropy": "transformations.forward.cross_entropy",
    "transformations.intra_operator.factor_products": "transformations.intra_operator.factor_matmuls",
    "transformations.intra_operator.hoist_products": "transformations.forward.hoist_matmuls",
    "transformations.intra_operator.matmul_bias": "transformations.layout.matmul_bias",
    "transformations.intra_operator.memory": "transformations.intra_operator.density",
    "transformations.intra_operator.recognise_attention": "transformations.forward.recognize_attention",
    "transformations.intra_operator.transpose_product": "transformations.intra_operator.transpose_matmul",
    "transformations.layout.convolve_by_product": "transformations.layout.convolution_as_matmul",
    "transformations.layout.fuse_into_product": "transformations.layout.fuse_matmul_epilogue",
    "transformations.layout.pack_products": "transformations.layout.pack_weights",
}
"""Old module -> its module, both below `daceml_train`."""

SYMBOLS: dict[str, dict[str, str]] = {
    "codegen.parts": {"Parts": "Emitter"},
    "codegen.phases": {"Phases": "Staging"},
    "codegen.products": {"Around": "MatmulEpilogue", "product_kernel": "matmul_kernel"},
    "driver.bound_step": {"Same": "IdentityGuard", "Followed": "SourceGuard"},
    "driver.looking": {"look": "capture_call", "Seen": "CapturedCall", "Stop": "CaptureDone"},
    "driver.observation": {"Observation": "Dump"},
    "driver.preparation": {"Preparation": "PrepackedWeights"},
    "driver.recomputed": {"Again": "Rematerialized"},
    "errors": {"Unmet": "BudgetInfeasible", "Elsewhere": "DeviceMismatch", "said": "message_of"},
    "exploration.subject": {"Treatment": "GradientSettings"},
    "exploration.view": {"View": "GraphView"},
    "frontends.torch.capture": {"View": "ResultView"},
    "graph.parts": {
        "Chain": "UpdateChain",
        "parts_of": "chunks_of",
        "chains": "update_chains",
        "part_rows": "chunk_rows",
        "chain_of": "update_chain_of",
    },
    "graph.pieces": {"Piece": "ConcatAlias", "pieces": "concat_aliases", "piece": "concat_alias"},
    "passes.base": {"View": "Uses"},
    "runtime.executor": {"View": "PlanView"},
    "runtime.kernel_search": {"KernelSearch": "Autotuner"},
    "runtime.pair_recording": {"Pair": "CudaGraphPair", "PairRecorder": "CudaGraphPairs"},
    "runtime.placement": {"standing_in": "device_override"},
    "runtime.products": {"Product": "MatmulShape", "Products": "MatmulTuner"},
    "runtime.program": {"Home": "Allocation", "Slot": "Buffer", "Place": "BufferView"},
    "runtime.recording": {"Recording": "CudaGraph", "Recorder": "CudaGraphs"},
    "transformations.global_movement.live": {"Items": "Liveness", "items_of": "liveness_of"},
    "transformations.global_movement.merge_equal": {"MergeEqual": "CommonSubexpressions"},
    "transformations.global_movement.narrow": {"narrowed": "without_dead_regions"},
    "transformations.global_movement.recompute": {"Recompute": "Rematerialize", "recomputed": "rematerialized"},
    "transformations.global_movement.recompute_cheap": {"RecomputeCheap": "RematerializeCheap"},
    "transformations.global_movement.runs": {"Runs": "RematCosts", "runs_of": "remat_costs_of"},
    "transformations.global_movement.spans": {"Spans": "LiveRanges", "Pause": "Gap", "Recipe": "RematRecipe"},
    "transformations.global_movement.stages": {"Stages": "RematStages", "Choice": "RematPlan"},
    "transformations.global_movement.store_kept": {"StoreKept": "CompressSaved"},
    "transformations.global_movement.update_in_parts": {"UpdateInParts": "ChunkUpdates"},
    "transformations.intra_operator.accumulate_products": {
        "Product": "MatmulTerm",
        "AccumulateProducts": "AccumulateMatmuls",
    },
    "transformations.intra_operator.assemble_slices": {"Piece": "SlicedPiece"},
    "transformations.intra_operator.attend_in_strips": {"AttendInStrips": "BlockedAttention"},
    "transformations.intra_operator.concatenate_products": {"ConcatenateProducts": "ConcatenateMatmuls"},
    "transformations.intra_operator.factor_products": {"FactorProducts": "FactorMatmuls"},
    "transformations.intra_operator.hoist_products": {"HoistProducts": "HoistMatmuls"},
    "transformations.intra_operator.recognise_attention": {
        "Written": "WrittenAttention",
        "RecogniseAttention": "RecognizeAttention",
    },
    "transformations.intra_operator.transpose_product": {"TransposeProduct": "TransposeMatmul"},
    "transformations.layout.convolve_by_product": {"ConvolveByProduct": "ConvolutionAsMatmul"},
    "transformations.layout.fuse_into_product": {"FuseIntoProduct": "FuseMatmulEpilogue"},
    "transformations.layout.pack_products": {"PackProducts": "PackWeights"},
}
"""Old module -> its names that have changed."""


def warn(old: str, new: str, level: int = 3) -> None:
    """Say that `old` is called `new`; `level` counts frames up to the user's line."""
    warnings.warn(f"{old} is called {new} now; the old name goes in version 0.2", DeprecationWarning, stacklevel=level)


def pass_name(name: str) -> str:
    """The name of a pass that may be given under its old name."""
    if name not in PASSES:
        return name
    warn(f"the pass {name}", PASSES[name], 4)
    return PASSES[name]


def moved(package: str, name: str) -> Any:
    """What a package that once was a module held under `name`. Raises `AttributeError` for anything else."""
    old = package.removeprefix(ROOT)
    # a module of the package that is imported by `from package import module` is none of them
    if old in MODULES and not name.startswith("__") and find_spec(f"{package}.{name}") is None:
        target = ROOT + MODULES[old]
        module = importlib.import_module(target)
        new = SYMBOLS.get(old, {}).get(name, name)
        if hasattr(module, new):
            warn(f"{package}.{name}", f"{target}.{new}")
            return getattr(module, new)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


class _Renamed(ModuleType):
    """An old module: its names, old or new, come from the new module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        old = self.__name__.removeprefix(ROOT)
        return getattr(importlib.import_module(ROOT + MODULES[old]), SYMBOLS.get(old, {}).get(name, name))


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Renamed(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        warn(f"the module {module.__name__}", ROOT + MODULES[module.__name__.removeprefix(ROOT)], 8)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = fullname.startswith(ROOT) and fullname.removeprefix(ROOT) in MODULES
        return ModuleSpec(fullname, _Loader()) if known else None


def install() -> None:
    """Make old modules importable: a finder after all others."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
