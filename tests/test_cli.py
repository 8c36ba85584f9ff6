import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.cli import main
from daceml_train.exploration import Session
from daceml_train.reporting import Report

MODEL = """
import torch
from torch import nn

def step():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(3, 4), torch.randn(3, 2)
    return model, inputs, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)

def module():
    return nn.Linear(4, 2), torch.randn(3, 4)

def wrong():
    return nn.Linear(4, 2)

def needs(batch):
    return nn.Linear(4, 2), torch.randn(batch, 4)

def kind():
    return nn.Linear, torch.randn(3, 4)

def other_shape():
    return nn.Linear(4, 2), torch.randn(3, 5)

def without_targets():
    model = nn.Linear(4, 2)
    return model, torch.randn(3, 4), nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)

def loss_class():
    return *without_targets()[:2], nn.MSELoss, without_targets()[3]
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "user_model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.mark.compiled
def test_report(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert main(["report", f"{model}:step", "--json", str(out)]) == 0
    assert "training step of Sequential, SGD" in capsys.readouterr().out
    assert json.loads(out.read_text())["functions"][0]["kernels"] > 0
    assert main(["report", f"{model}:module"]) == 0
    assert "module of Linear" in capsys.readouterr().out


def test_report_for_a_device_that_is_not_there(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{model}:step", "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "predicted on NVIDIA H100 80 GB SXM, not measured" in out and "the most expensive launches" in out
    assert "eager PyTorch" in out and "times as fast" in out
    assert main(["report", f"{model}:module", "--device", "l4", "--no-eager"]) == 0
    assert "eager" not in capsys.readouterr().out
    assert main(["report", f"{model}:step", "--device", "h1000"]) == 1
    assert "no device is called 'h1000', did you mean 'h100'?" in capsys.readouterr().err


@pytest.mark.compiled
def test_pages_and_traces(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, events = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["report", f"{model}:step", "-o", str(page), "--runs", "2"]) == 0
    assert page.read_text().startswith("<!doctype html>") and "Roofline" in page.read_text()
    assert "PyTorch's own kernels move" in capsys.readouterr().out
    assert main(["trace", f"{model}:step", "-o", str(events), "--runs", "1"]) == 0
    assert any(event["ph"] == "X" for event in json.loads(events.read_text())["traceEvents"])
    assert main(["trace", f"{model}:step", "--runs", "0"]) == 1
    assert "--runs must be at least 1" in capsys.readouterr().err
    assert main(["roofline"]) == 0
    assert "copy bandwidth" in capsys.readouterr().out


@pytest.mark.compiled
def test_dumps_and_paths_that_cannot_be_written(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dump"
    assert main(["report", f"{model}:step", "--no-eager", "--runs", "1", "--dump", str(folder)]) == 0
    assert {".txt", ".sdfg", ".plan", ".cpp"} <= {path.suffix for path in folder.iterdir()}
    assert "DACEML_TRAIN_DUMP" not in os.environ
    capsys.readouterr()
    for option, path in (("--dump", f"{model}/dump"), ("-o", str(tmp_path)), ("--json", "/nowhere/report.json")):
        assert main(["report", "never_read.py:step", option, path]) == 2
        assert path in capsys.readouterr().err


def saved(model: str, path: Path) -> Path:
    """A session of the model, with one place kept by hand."""
    session = Session(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4))
    session.apply(session.matches(pass_="fuse_elementwise", module_path="1")[0])
    return session.save(path)


def test_replay(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(model, tmp_path / "mine.json")
    again = tmp_path / "again.py"
    assert main(["replay", str(path), f"{model}:step", "-o", str(again)]) == 0
    message = capsys.readouterr().out
    assert "1 of 1 steps applied" in message
    assert "fuse_elementwise" in message
    assert dt.Pipeline.of(again) == dt.Pipeline.of(path)
    assert main(["replay", str(path), f"{model}:module"]) == 1
    assert "no operator belongs to module '1'" in capsys.readouterr().out
    path.write_text(path.read_text()[:40])
    assert main(["replay", str(path), f"{model}:step"]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nothing.json"), f"{model}:step"]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.compiled
def test_replay_verifies(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "training.txt"
    path.write_text(str(dt.TRAINING))
    assert main(["replay", str(path), f"{model}:step", "--verify"]) == 0
    message = capsys.readouterr().out
    assert "all right: 1 result, 4 updates, 4 gradients; compared with PyTorch in float64" in message


def test_diff(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, numbers = saved(model, tmp_path / "mine.json"), tmp_path / "diff.json"
    assert main(["diff", "none", str(path), f"{model}:step", "--json", str(numbers)]) == 1
    message = capsys.readouterr().out
    assert "+at_place(apply='fuse_elementwise()', module='1'" in message
    told = json.loads(numbers.read_text())
    assert told["bytes"][1] < told["bytes"][0] and not told["same"]
    assert main(["diff", str(path), str(path), f"{model}:step"]) == 0
    for wrong, sentence in {
        ("training", "nothing.json", f"{model}:step"): "there is no file nothing.json",
        ("training", "none"): "pipelines are compared on a model",
        ("training", "none", f"{model}:nothing"): "has no function 'nothing'",
    }.items():
        assert main(["diff", *wrong]) == 2
        assert sentence in capsys.readouterr().err


REPORT = {
    "kind": "training step",
    "name": "Net, SGD",
    "breaks": [],
    "functions": [
        {
            "name": "step",
            "captured": 1000,
            "moved": 600,
            "flops": 50,
            "kernels": 2,
            "distinct_kernels": 2,
            "programs": 1,
            "arena": 64,
            "inputs": 100,
            "memory": [10, 30],
            "calls": {"mm": 1},
            "fallbacks": [],
            "launches": [
                {"operators": "gelu, mul", "bytes": 400, "seconds": 0.25},
                {"operators": "sub", "bytes": 200, "seconds": 0.5},
            ],
        }
    ],
}


def test_diff_of_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    other = json.loads(json.dumps(REPORT))
    for path, held in zip(paths, (REPORT, other), strict=True):
        path.write_text(json.dumps(held))
    other["functions"][0]["launches"][0]["seconds"] = 9.0
    paths[1].write_text(json.dumps(other))
    assert main(["diff", *map(str, paths)]) == 0  # times are no difference
    assert "the reports agree" in capsys.readouterr().out
    other["functions"][0] |= {"moved": 500, "fallbacks": [["aten.sort", "net.py:3"]], "memory": [10, 20]}
    other["functions"][0]["launches"][0]["bytes"] = 300
    paths[1].write_text(json.dumps(other))
    assert main(["diff", *map(str, paths), "--json", str(tmp_path / "told.json")]) == 1
    message = capsys.readouterr().out
    assert "+ step falls back: aten.sort net.py:3" in message and "gelu, mul" in message and "sub " not in message
    told = json.loads((tmp_path / "told.json").read_text())
    assert ["step", "moved", 600, 500] in told["numbers"] and ["step", "peak", 130, 120] in told["numbers"]
    page = tmp_path / "both.html"
    assert main(["diff", *map(str, paths), "--html", str(page)]) == 1
    text = page.read_text()
    for part in ("a and b", "bytes moved", "600 B", "500 B", "−16.7 %", "gelu, mul", "0.03 ×", "aten.sort net.py:3"):
        assert part in text, part
    assert main(["diff", str(paths[0]), "training"]) == 2
    assert f"a report is compared with a report: {paths[0]} is one, and training is not" in capsys.readouterr().err
    for damaged in (3, [{"name": "step"}], [{**other["functions"][0], "launches": [{"bytes": 3}]}]):
        paths[1].write_text(json.dumps({**REPORT, "functions": damaged}))
        assert main(["diff", *map(str, paths)]) == 2
        assert f"{paths[1]} is a damaged report, or one of another version" in capsys.readouterr().err


def test_a_page_is_of_two_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["diff", "training", "none", "--html", str(tmp_path / "both.html")]) == 2
    assert "--html is for two reports" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ("replay {report} {model}:step", 2, "the file is a report, not a pipeline; `daceml-train diff` compares"),
        ("replay trainig {model}:step", 2, "trainig is neither a pipeline's file nor one of training, inference"),
        ("diff trainig none {model}:step", 2, "mixed_precision, none, did you mean 'training'?"),
        ("bisect {model}:step --pipeline trainig", 2, "did you mean 'training'?"),
        ("explain {model}:step --pipeline none", 2, "--pipeline and --code are about an operator: name it, --node"),
        ("bisect {model}:step --folder {report}", 2, "{report} is a file, and expected to be a folder"),
        ("bisect {model}:step --folder {report}/new/er", 2, "{report} is a file, and expected to be a folder"),
        ("diff {report} {report} --json /dev/full", 2, "/dev/full cannot be written: No space left on device"),
        ("diff {report} {report} --html /dev/full", 2, "/dev/full cannot be written: No space left on device"),
        ("bisect {model}:other_shape", 2, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2)"),
        ("diff {report} {report} --html /nowhere/both.html", 2, "/nowhere/both.html cannot be written"),
        ("run {model}:step", 1, "run takes an ONNX model, FILE.onnx, given {model}:step"),
    ],
)
def test_what_a_command_does_not_take_is_named(
    model: str, tmp_path: Path, arguments: str, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"model": model, "report": str(tmp_path / "report.json")}
    Path(names["report"]).write_text(json.dumps(REPORT))
    assert main([argument.format(**names) for argument in arguments.split()]) == status
    assert sentence.format(**names) in capsys.readouterr().err


def test_nothing_to_simulate(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = Report("module", "Linear", (), ("a reason",))
    monkeypatch.setattr("daceml_train.cli.reports._measured", lambda *_, **__: nothing)
    assert main(["simulate", f"{model}:module"]) == 1
    assert "nothing was compiled, so there is nothing to simulate" in capsys.readouterr().err


def test_explain_a_node(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "code"
    assert main(["explain", f"{model}:step", "--node", "%tanh", "--code", str(folder)]) == 0
    message = capsys.readouterr().out
    assert message.startswith("%tanh = tanh(")
    assert "module  1" in message and "f32[3, 8], 96 B" in message and "fuse_elementwise" in message
    levels = [line.split() for line in message.partition("bytes moved\n")[2].partition("  passes")[0].splitlines()]
    assert levels[0][:2] == ["at", "first"] and levels[-1][0] == "global_movement"
    (kernel,) = folder.glob("kernel_*.cpp")
    assert f"    {kernel.stem}" in message and f"void {kernel.stem}(" in kernel.read_text()
    assert main(["explain", f"{model}:step", "--node", "mse_loss", "--pipeline", "none"]) == 0
    assert "no pass changes it" in capsys.readouterr().out
    assert main(["explain", f"{model}:step", "--node", "reduce.sum", "--pipeline", "none"]) == 1
    assert "operators are called 'reduce.sum'" in capsys.readouterr().err
    assert main(["explain", f"{model}:step", "--node", "nonsense", "--pipeline", "none"]) == 1
    assert "no operator is called 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{model}:nothing", "has no function 'nothing'"),
        ("{model}:wrong", "wrong() must return (module, inputs) or (module, inputs, loss, optimizer)"),
        ("{model}:stpe", "has no function 'stpe', did you mean 'step'?"),
        ("{model}", "names no function; expected FILE.py:FACTORY"),
        ("missing", "names no file and function; expected FILE.py:FACTORY"),
        ("missing.py:step", "there is no file missing.py"),
        ("missing.onnx", "there is no ONNX file missing.onnx"),
        ("{model}:needs", "needs() of {model} has the parameter 'batch', and is called without arguments"),
        ("{model}:kind", "kind() must return a torch.nn.Module first, and returned Linear"),
        ("{model}:step --size batch=3", "--input and --size are for ONNX models, and the inputs of {model}:step are"),
        ("{model}:step --tf32", "--tf32 is about a GPU that is not there: name it, --device NAME"),
        ("{model}:without_targets", "the loss is called with the output and 0 targets: mse_loss() missing 1 required"),
        ("{model}:other_shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2) (in a call of"),
        ("{model}:other_shape --no-eager", "daceml_train: the module was given argument 0: float32[3, 5]"),
        ("{model}:loss_class", "loss must be callable or None, given the class MSELoss itself; pass MSELoss()"),
    ],
)
def test_report_of_what_is_not_there(model: str, place: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *place.format(model=model).split()]) in (1, 2)
    assert reason.format(model=model) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["diff", "missing.json", "training", "{model}:step"], 2),
        (["diff", "training", "missing.json", "{model}:step"], 2),
        (["replay", "missing.json", "{model}:step"], 2),
        (["bisect", "{model}:step", "--pipeline", "missing.json"], 2),
        (["explain", "missing.json:step"], 1),
        (["simulate", "missing.json"], 1),
        (["run", "{model}.onnx", "--input", "missing.json"], 1),
    ],
)
def test_a_missing_file_is_named_before_the_work(
    model: str, arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("daceml_train.cli.models.made_by", pytest.fail)
    Path(f"{model}.onnx").write_text("")
    assert main([argument.format(model=model) for argument in arguments]) == status
    assert capsys.readouterr().err == "daceml-train: there is no file missing.json\n"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("x = (1\n", 1, "SyntaxError: '(' was never closed"),
        ("\ndef step():\n    return open('/nowhere/data')\n", 3, "FileNotFoundError: "),
        ("import json\ndef step():\n    return json.loads('{')\n", 3, "JSONDecodeError: "),
        (
            "from torch import nn, ones\n\nclass Model(nn.Linear):\n    def forward(self, x):\n"
            "        return super().forward(x) @ ones(5, 5)\n\ndef step():\n    return Model(4, 2), ones(3, 4)\n",
            5,
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
    ],
)
def test_an_error_in_the_users_file_shows_its_lines_first(
    text: str, line: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert main(["report", f"{path}:step", "--no-eager"]) == 1
    first, _, rest = capsys.readouterr().err.partition("\n")
    assert first.startswith(f"daceml-train: {path}:{line}: {reason}")
    assert "daceml_train/" not in rest.partition("broken.py")[0]


def test_an_error_elsewhere_is_not_the_users(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("daceml_train.cli.reports._measured", fail)
    with pytest.raises(ZeroDivisionError):
        main(["report", f"{model}:step"])


def test_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.so").write_bytes(bytes(1500))
    assert main(["cache", "show", "--folder", str(tmp_path)]) == 0
    assert "1.5 kB" in capsys.readouterr().out
    assert main(["cache", "clear", "--folder", str(tmp_path)]) == 0
    assert "1.5 kB removed" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.compiled
def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    message = capsys.readouterr().out
    assert "WRONG" not in message
    assert "two layers trained for three steps" in message


def test_doctor_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 1
    assert "WRONG the C++ compiler 'no-such-compiler' does not run" in capsys.readouterr().out


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """The metadata of an environment in which a package is not installed."""
    found = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


@pytest.mark.compiled
def test_a_source_tree_that_is_not_installed_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without(monkeypatch, "daceml_train")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert dt.__version__ in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert f"ok    numpy {importlib.metadata.version('numpy')}" in capsys.readouterr().out


def test_doctor_names_the_remote_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DACEML_TRAIN_REMOTE_CACHE", f"file://{tmp_path}/common")
    assert main(["doctor"]) == 1
    assert "is set without $DACEML_TRAIN_REMOTE_CACHE_KEY" in capsys.readouterr().out
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    monkeypatch.setenv("DACEML_TRAIN_REMOTE_CACHE_KEY", str(secret))
    assert main(["doctor"]) == 0
    assert f"ok    remote cache: file://{tmp_path}/common" in capsys.readouterr().out


def test_doctor_names_a_missing_requirement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without(monkeypatch, "networkx")
    assert main(["doctor"]) == 1
    assert "WRONG networkx is not installed, networkx" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["report"], ["cache", "burn"], ["nonsense"]])
def test_wrong_use_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "command",
    ["", "report", "run", "trace", "roofline", "replay", "diff", "explain", "bisect", "passes", "cache", "doctor"],
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "usage: daceml-train" in capsys.readouterr().out


def test_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "daceml_train", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()[0]) == (0, "daceml_train")


def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    message = capsys.readouterr().out
    assert "fusion\n" in message
    assert "  fuse_elementwise             Compute a chain" in message
    assert main(["passes", "fuse_elementwise"]) == 0
    assert "limit: int = 96" in capsys.readouterr().out
    assert main(["passes", "fuse_elementwize"]) == 1
    assert "did you mean 'fuse_elementwise'?" in capsys.readouterr().err
