"""What users of `optimize` and `training_step` may choose: `Options`, and the same as keyword arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args

from daceml_train import logs
from daceml_train.driver.dump import Dump
from daceml_train.driver.settings import Concurrency, Settings
from daceml_train.errors import Invalid, nearest
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.passes.pipeline import Pipeline, Watcher
from daceml_train.plugins import OPERATORS, PASSES, load_plugins
from daceml_train.renamed import warn
from daceml_train.runtime.cache import Cache
from daceml_train.storage.folders import cache_folder
from daceml_train.storage.named_by_user import path_of
from daceml_train.storage.remote import remote_cache
from daceml_train.transformations.pipelines import INFERENCE, TRAINING, given_pipeline

Progress = Callable[[int, int], None]
ScheduleKind = Literal["ahead_of_time", "plain"]
"""On a GPU: the program is captured as a CUDA graph and replayed as one launch, or runs launch by launch. On a CPU,
both run the same launch list."""

RENAMED = {"observe": "dump", "watch": "pass_callback", "search": "autotune"}
"""Old keyword -> the option that it is now."""


@dataclass(frozen=True)
class Options:
    """How a model is compiled: `optimize(model, options=Options(...))`, the same for `training_step`.

    Each field is also a keyword argument of both functions; `options` may be a dictionary, too. A keyword takes
    precedence over `options`, so that `optimize(model, options=house, jobs=1)` differs from `house` in one option.
    Options are values: they compare, are pickled (without the two callbacks), and are changed by
    `dataclasses.replace`.

    Options:
        pipeline: Pipeline | str | Path | None = None
            The transformations: a `Pipeline`, its text, the path of a JSON, text or Python file that holds one, or
            the name of one that comes with the package: training, inference, mixed_precision, none.
            None: `TRAINING` where gradients are asked for, `INFERENCE` elsewhere.
        cache: Path | str | None = None
            The folder of compiled programs. None: `$DACEML_TRAIN_CACHE`, else the user's cache folder.
        jobs: int | None = None
            The most compiler processes at once. None: one per core.
        dump: Dump | Path | str | None = None
            A folder that receives the graph's text after each pass, an SDFG for DaCe's viewers, the plan of buffers
            and launches, and the kernels' C++ or CUDA. Programs are compiled for that even if they are cached. None:
            `$DACEML_TRAIN_DUMP`, else nothing is written.
        pass_callback: Watcher | None = None
            A function that is called with a `Step` after each pass, also for a program that comes from the cache.
        progress: Progress | None = None
            A function that is called with (kernels done, kernels in all) while kernels compile.
        dynamic: bool | None = None
            Whether sizes of arguments are symbols, as for `torch.compile`: from the first call on (True), never
            (False: each size is compiled), or once a second size was seen (None).
        random: Randomness = 'seeded'
            `'seeded'`: random numbers come from a seed that each call draws from PyTorch's generator. `'eager'`: they
            are the very numbers of eager execution, drawn with PyTorch's operators and in its order, so that runs
            can be compared.
        autotune: bool = True
            On a GPU, compile kernels that move megabytes with a few launch configurations and measure them at the
            first call of each size. What was found is kept in the cache.
        concurrency: Concurrency = 'measured'
            On CPUs, `'measured'` finds in the first calls how many threads are fastest for each launch and which
            launches run side by side, and keeps it in the cache; threads drop to one where other processes have the
            cores. Results are the same bits. `'off'`: all launches take `torch.get_num_threads()`, in order.
        schedule: ScheduleKind | None = None
            On a GPU, `'ahead_of_time'` captures programs as CUDA graphs, one launch each; `'plain'`
            launches kernel by kernel. None: `'ahead_of_time'` for `training_step`, `'plain'` for `optimize`; see
            `docs/internals/gpu.md`.
    """

    pipeline: Pipeline | str | Path | None = None
    cache: Path | str | None = None
    jobs: int | None = None
    dump: Dump | Path | str | None = None
    pass_callback: Watcher | None = None
    progress: Progress | None = None
    dynamic: bool | None = None
    random: Randomness = "seeded"
    autotune: bool = True
    concurrency: Concurrency = "measured"
    schedule: ScheduleKind | None = None

    def __post_init__(self) -> None:
        kinds = (("random", Randomness), ("concurrency", Concurrency), ("schedule", ScheduleKind))
        for name, kind in kinds:
            given = getattr(self, name)
            if given not in get_args(kind) and not (name == "schedule" and given is None):
                close = nearest(given, get_args(kind)) if isinstance(given, str) else ""
                raise Invalid(f"{name} is one of {', '.join(get_args(kind))}, given {given!r}{close}")
        for name, allowed in (("dynamic", (True, False, None)), ("autotune", (True, False))):
            if not any(getattr(self, name) is value for value in allowed):
                raise Invalid(f"{name} is {' or '.join(map(str, allowed))}, given {getattr(self, name)!r}")
        if self.jobs is not None and (not isinstance(self.jobs, int) or isinstance(self.jobs, bool) or self.jobs < 1):
            raise Invalid(f"jobs is a positive whole number or None, given {self.jobs!r}")
        for name in ("pass_callback", "progress"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise Invalid(f"{name} is called while compiling, given {getattr(self, name)!r}")

        if self.cache is not None:
            path_of(self.cache, "cache")

    def __getstate__(self) -> dict[str, Any]:
        """Without `pass_callback` and `progress`, which belong to this process."""
        return {**self.__dict__, "pass_callback": None, "progress": None}

    def settings(self) -> Settings:
        """What these options stand for here: plugins are loaded, files read, and folders checked, before any work."""
        logs.install()
        load_plugins(PASSES, OPERATORS)
        remote_cache()  # one that cannot be used is an error here, not a reason to fall back while compiling
        chosen, inference = (TRAINING, INFERENCE) if self.pipeline is None else (given_pipeline(self.pipeline), None)
        return Settings(
            pipeline=chosen,
            cache=Cache(cache_folder(self.cache)),
            jobs=self.jobs,
            dump=Dump.of(self.dump),
            progress=self.progress,
            pass_callback=self.pass_callback,
            dynamic=self.dynamic,
            randomness=self.random,
            autotune=self.autotune,
            concurrency=self.concurrency,
            cuda_graphs=self.schedule == "ahead_of_time",
            inference=inference,
        )


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for type checkers."""

    pipeline: Pipeline | str | Path | None
    cache: Path | str | None
    jobs: int | None
    dump: Dump | Path | str | None
    pass_callback: Watcher | None
    progress: Progress | None
    dynamic: bool | None
    random: Randomness
    autotune: bool
    concurrency: Concurrency
    schedule: ScheduleKind | None


NAMES = tuple(f.name for f in dataclasses.fields(Options))


def chosen(
    function: str,
    options: Options | Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
    others: Iterable[str] = (),
    level: int = 5,
    of_mode: Mapping[str, Any] | None = None,
) -> Options:
    """The options with the keyword arguments of a call of `function`, which go before them.

    `others` are names that the function takes besides, for suggestions; `level` counts frames from `renamed.warn` to
    the user's line; what `of_mode` has goes before defaults. Raises `Invalid` for unknown names and for what is
    neither `Options` nor a mapping.
    """
    if isinstance(options, Options):
        if of_mode:
            raise Invalid(
                "mode and a daceml_train.Options exclude each other", advice="pass the options as a dictionary"
            )
        given = options
    elif options is None or isinstance(options, Mapping):
        given = Options(**{**(of_mode or {}), **current(function, options or {}, others, level)})
    else:
        advice = "pass keyword arguments, a dictionary, or daceml_train.Options(...)"
        raise Invalid(f"options of {function} are daceml_train.Options, given {options!r}", advice=advice)
    return dataclasses.replace(given, **current(function, keywords, others, level))


def current(function: str, keywords: Mapping[str, Any], others: Iterable[str] = (), level: int = 4) -> dict[str, Any]:
    """Keyword arguments under the names that they have now. Raises `Invalid` for unknown ones."""
    known: dict[str, Any] = {}
    for name, value in keywords.items():
        new = RENAMED.get(name, name)
        if new not in NAMES:
            every = dict.fromkeys((*NAMES, *others))
            close = nearest(name, every)
            raise Invalid(f"{function} has no option {name!r}{close}", advice=f"there are {', '.join(every)}")
        if new != name:
            warn(f"the option {name}", new, level)
        if new in known or (new != name and new in keywords):
            raise Invalid(f"{function} is given {new} and {name}, which are the same option")
        known[new] = value
    return known


F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """The function, whose signature and docstring for readers and editors list the fields of `Options`."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = inspect.signature(Options).parameters.values()
    listed = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fields]
    function.__dict__["__signature__"] = signature.replace(parameters=[*own, *listed])
    text = Options.__doc__ or ""  # none with python -OO
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n{text[text.find('    Options:') :]}"
    return function
