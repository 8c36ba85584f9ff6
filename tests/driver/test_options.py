"""`Options`, keyword arguments, old names, and what is said about options that do not exist or do not fit."""

import ast
import dataclasses
import inspect
import pickle
import re
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.driver.dump import Dump
from daceml_train.driver.module import state_of
from daceml_train.driver.options import RENAMED, OptionKeywords, current
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import TrainingStep
from daceml_train.transformations.pipelines import MIXED_PRECISION


def step(**keywords: Any) -> TrainingStep:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.training_step(model, nn.functional.mse_loss, optimizer, **keywords)


def module_settings(**keywords: Any) -> Settings:
    state = state_of(dt.optimize(nn.Linear(3, 2), **keywords))
    assert state is not None
    return state.options


FACES: list[Callable[..., Settings]] = [module_settings, lambda **keywords: step(**keywords).options]


@pytest.mark.parametrize("result", FACES, ids=["optimize", "training_step"])
def test_a_value_says_the_same_as_keywords(result: Callable[..., Settings], tmp_path: Path) -> None:
    given: dict[str, Any] = {"pipeline": "fusion: fuse_elementwise()", "cache": tmp_path, "jobs": 1, "dynamic": False}
    given |= {"random": "eager", "autotune": False}
    assert result(options=dt.Options(**given)) == result(**given)
    assert result(options=dt.Options(**given), jobs=2) == result(**{**given, "jobs": 2})
    assert result(options=given, jobs=2) == result(**{**given, "jobs": 2})
    assert result(**given) != result()


def test_the_schedule_is_that_of_the_function_unless_one_is_given() -> None:
    assert step().schedule == step(options=dt.Options()).schedule == "ahead_of_time"
    assert step(options=dt.Options(schedule="plain")).schedule == "plain"
    assert not module_settings().cuda_graphs
    assert module_settings(options=dt.Options(schedule="ahead_of_time")).cuda_graphs


@pytest.mark.parametrize("result", FACES, ids=["optimize", "training_step"])
def test_old_names_are_understood(result: Callable[..., Settings], tmp_path: Path) -> None:
    heard: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = result(observe=tmp_path, watch=heard.append, search=False)
    assert found == result(dump=tmp_path, pass_callback=heard.append, autotune=False)
    told = [w for w in caught if w.category is DeprecationWarning]
    assert len(told) == 3
    for warning, (old, new) in zip(told, RENAMED.items(), strict=True):
        assert f"the option {old} is called {new} now" in str(warning.message)
        assert warning.filename == __file__
    with pytest.raises(dt.Invalid, match="dump and observe, which are the same option"):
        result(observe=tmp_path, dump=tmp_path)


def test_a_pipeline_is_given_by_name() -> None:
    assert dt.Options(pipeline="mixed_precision").settings().pipeline == MIXED_PRECISION
    assert dt.Options(pipeline="none").settings().pipeline == dt.Pipeline()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pipelines": ""}, "has no option 'pipelines', did you mean 'pipeline'?"),
    ({"autotun": True}, "has no option 'autotun', did you mean 'autotune'?"),
    ({"fast": True}, "has no option 'fast'; there are pipeline, cache, jobs"),
    ({"pipeline": "trainings"}, "no pipeline is called 'trainings', did you mean 'training'?; known: training, infer"),
    ({"random": "eagre"}, "random is one of seeded, eager, given 'eagre', did you mean 'eager'?"),
    ({"schedule": "plane"}, "schedule is one of ahead_of_time, plain, given 'plane', did you mean 'plain'?"),
    ({"jobs": 0}, "jobs is a positive whole number or None, given 0"),
    ({"dynamic": "yes"}, "dynamic is True or False or None, given 'yes'"),
    ({"autotune": None}, "autotune is True or False, given None"),
    ({"progress": True}, "progress is called while compiling, given True"),
    ({"dump": 3}, "dump is a folder's path or a Dump, given 3"),
    ({"cache": 3}, "cache is a path, given 3"),
    ({"cache": ""}, "cache is a path, given ''"),
    ({"options": {"job": 1}}, "no option 'job', did you mean 'jobs'"),
    ({"options": ["jobs"]}, "are daceml_train.Options, given ['jobs']"),
]


@pytest.mark.parametrize("result", FACES, ids=["optimize", "training_step"])
@pytest.mark.parametrize(("given", "sentence"), WRONG, ids=[next(iter(w[0])) for w in WRONG])
def test_what_does_not_exist_or_fit_is_said_at_once(
    result: Callable[..., Settings], given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(dt.Invalid, match=re.escape(sentence)):
        result(**given)


NAN = float("nan")
ONLY_OF_STEPS: list[tuple[dict[str, Any], str]] = [
    ({"clip_norm": NAN}, "clip_norm is a number of at least 0, given nan"),
    ({"clip_value": NAN}, "clip_value is a number of at least 0, given nan"),
    ({"clip_norm": 1.0, "norm_type": "x"}, "norm_type is the order of a norm, a number, given 'x'"),
    ({"clip_norm": 1.0, "norm_type": NAN}, "norm_type is the order of a norm, a number, given nan"),
    ({"keep_gradients": "x"}, "keep_gradients is True or False, given 'x'"),
    ({"sync_batch_norm": 1}, "sync_batch_norm is True or False, given 1"),
    ({"micro_batches": True}, "micro_batches is a positive whole number, given True"),
    ({"reduction": "maen"}, "reduction is 'batch', 'mean' or 'sum', given 'maen', did you mean 'mean'?"),
    ({"scaler": torch.amp.GradScaler}, "scaler is a torch.amp.GradScaler, given the class GradScaler itself"),
]


@pytest.mark.parametrize(("given", "sentence"), ONLY_OF_STEPS)
def test_options_of_steps_that_do_not_fit(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(dt.Invalid, match=re.escape(sentence)):
        step(**given)
    own = set(inspect.signature(dt.Session).parameters)
    if own >= given.keys():
        model = nn.Linear(3, 2)
        given = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD(model.parameters()), **given}
        with pytest.raises(dt.Invalid, match=re.escape(sentence)):
            dt.Session(model, torch.ones(4, 3), torch.ones(4, 2), **given)


def _new(model: Any = None, loss: Any = nn.functional.mse_loss, optimizer: Any = None) -> TrainingStep:
    plain = nn.Linear(3, 2)
    return dt.training_step(model or plain, loss, optimizer or torch.optim.SGD(plain.parameters()))


ARGUMENTS: list[tuple[Callable[[], object], str]] = [
    (lambda: dt.optimize(nn.Linear), "optimize takes a module, given the class Linear itself; make one: Linear(...)"),
    (lambda: dt.optimize(3), "optimize takes a torch.nn.Module, given int"),
    (lambda: dt.optimize(nn.Linear(3, 2), mode=[]), "mode is one of default, reduce-overhead"),  # type: ignore[arg-type]
    (lambda: dt.optimize(nn.LazyLinear(3)), "the parameters of the LazyLinear have no sizes yet; call it once before"),
    (lambda: dt.to_sdfg(nn.Linear(3, 2)), "Linear does not take 0 inputs: missing a required argument: 'input'"),
    (lambda: dt.export_html(3, "page.html"), "export_html takes a session, given int"),  # type: ignore[arg-type]
    (lambda: dt.torch_function(3, "a::b"), "torch_function takes a class of operators, given 3"),  # type: ignore[arg-type]
    (lambda: dt.torch_function(dt.Operator, 3), "3 is no name of a PyTorch operator; expected"),  # type: ignore[arg-type]
    (lambda: dt.run_trials(3, [], 5), "make is a function that returns a daceml_train.Stages, given int"),  # type: ignore[arg-type]
    (lambda: dt.run_trials(print, {}, 5), "trials is a list of settings, a dictionary for each trial, given dict"),  # type: ignore[arg-type]
    (lambda: _new(model=nn.Linear), "model must be a torch.nn.Module, given the class Linear itself"),
    (lambda: _new(loss=nn.MSELoss), "loss must be callable or None, given the class MSELoss itself; pass MSELoss()"),
    (lambda: _new(optimizer=torch.optim.SGD), "must be a torch.optim.Optimizer, given the class SGD itself"),
    (lambda: dt.debug.explain(nn.Linear), "explain takes a module, given the class Linear itself"),
    (lambda: dt.debug.bisect(_new(), torch.ones(2)), "given TrainingStep; give it step.model"),  # type: ignore[arg-type]
    (lambda: dt.debug.bisect(None, torch.ones(2)), "bisect takes a torch.nn.Module, given NoneType"),  # type: ignore[arg-type]
    (lambda: dt.debug.bisect(nn.Linear(3, 2), torch.ones(2, 3), folder=3), "folder is a path, given 3"),  # type: ignore[arg-type]
    (lambda: dt.debug.bisect(nn.Linear(3, 2), code=3), "code is True or False, given 3"),  # type: ignore[arg-type]
    (lambda: dt.report(_new(), 3), "run is a function that is called, given int; run=lambda: step(x, y)"),  # type: ignore[arg-type]
    (lambda: dt.report(_new(), eager="x"), "eager is a function that is called, given str"),  # type: ignore[arg-type]
    (lambda: dt.report(_new(), runs=-3), "runs is a positive whole number, given -3"),
    (lambda: dt.report(_new(), ranks=2, link=3), "needs ranks= and link=, a daceml_train.Link"),  # type: ignore[arg-type]
    (lambda: dt.report(_new()).save(3), "the report is a path, given 3"),  # type: ignore[arg-type]
    (lambda: dt.report(_new()).save("/proc"), "/proc is a folder, and the report is a file"),
    (lambda: dt.report(_new()).save("/proc/none/report.html"), "the report cannot be written: "),
    (lambda: dt.Link("x", 1.0), "a link has numbers of seconds and of bytes per second, given Link(alpha='x'"),  # type: ignore[arg-type]
    (lambda: dt.Pipeline.parse(3), "a pipeline's text is a string, given int"),  # type: ignore[arg-type]
    (lambda: dt.Pipeline.from_json(3), "the pipeline is not JSON: "),  # type: ignore[arg-type]
    (lambda: dt.Pipeline.from_json('{"kind": "", "functions": [], "breaks": []}'), "a report, not a pipeline"),
    (lambda: dt.Pipeline(fusion=3), "level fusion is a tuple of passes, given 3"),  # type: ignore[arg-type]
    (lambda: dt.TRAINING.without(3), "a place is a pass's class or name, or a level, given 3"),  # type: ignore[arg-type]
    (lambda: dt.TRAINING.only([]), "a place is a pass's class or name, or a level, given []"),  # type: ignore[arg-type]
    (lambda: dt.TRAINING.with_options(None, limit=3), "a place is a pass's class or name, or a level, given None"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "sentence"), ARGUMENTS, ids=[sentence[:40] for _, sentence in ARGUMENTS])
def test_arguments_of_another_type_are_named(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(dt.Invalid, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize(
    ("inputs", "given", "sentence"),
    [
        (2, {}, "Linear does not take 2 inputs: too many positional arguments; targets are for a loss, loss="),
        (0, {}, "Linear does not take 0 inputs: missing a required argument: 'input'; pass the model's inputs"),
        (1, {"optimizer": True}, "loss=None uses the result's `loss`, and the model's result has none; pass loss="),
        (2, {"optimizer": False, "loss": nn.functional.mse_loss}, "updates no parameter that the loss depends on"),
        (-1, {}, "Linear cannot be called with argument 0: float32[4, 1]: RuntimeError: a and b must have same"),
    ],
)
def test_a_session_says_what_is_missing(inputs: int, given: dict[str, Any], sentence: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    if "optimizer" in given:
        given = {**given, "optimizer": torch.optim.SGD((model if given["optimizer"] else other).parameters())}
    tensors = [torch.ones(4, 1)] if inputs < 0 else [torch.ones(4, 3), torch.ones(4, 2)][:inputs]
    with pytest.raises(dt.Invalid, match=re.escape(sentence)):
        dt.Session(model, *tensors, **given)


def test_suggestions_know_what_the_function_takes_besides() -> None:
    with pytest.raises(dt.Invalid, match="training_step has no option 'clip_nrom', did you mean 'clip_norm'"):
        step(clip_nrom=1.0)


def test_a_folder_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(dt.Invalid, match="nothing can be dumped into .*file"):
        dt.optimize(nn.Linear(3, 2), dump=tmp_path / "file")
    assert Dump.of(tmp_path / "new" / "folder") == Dump(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("function", [dt.optimize, dt.training_step])
def test_help_lists_every_option(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    text = inspect.getdoc(function) or ""
    for field in dataclasses.fields(dt.Options):
        assert parameters[field.name].default == field.default
        assert f"    {field.name}: {field.type} = {field.default!r}\n        " in text
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("options", "mode"):
            assert f"    {name}: {parameter.annotation} = {parameter.default!r}\n        " in text


def test_type_checkers_know_the_same_keywords() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(dt.Options)}
    tree = ast.parse(inspect.getsource(OptionKeywords))
    listed = {
        str(ast.unparse(n.target)): ast.unparse(n.annotation) for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)
    }
    assert listed == fields
    assert not typing.get_type_hints(OptionKeywords).keys() - fields.keys()


def test_options_are_values() -> None:
    chosen = dt.Options(jobs=2, pipeline="fusion: fuse_elementwise()")
    assert pickle.loads(pickle.dumps(dataclasses.replace(chosen, progress=print))) == chosen
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.jobs = 3  # type: ignore[misc]
    assert current("f", {"jobs": 2}) == {"jobs": 2}


def test_modes_of_torch_compile() -> None:
    assert module_settings(mode="default") == module_settings()
    assert module_settings(mode="reduce-overhead").cuda_graphs and not module_settings().cuda_graphs
    assert not module_settings(mode="reduce-overhead", schedule="plain").cuda_graphs
    assert not module_settings(mode="reduce-overhead", options={"schedule": "plain"}).cuda_graphs
    with pytest.raises(dt.Invalid, match="mode is one of .*did you mean 'reduce-overhead'"):
        module_settings(mode="reduce_overhead")
    with pytest.raises(dt.Invalid, match="exclude each other"):
        module_settings(mode="reduce-overhead", options=dt.Options())
