"""Building native sources: keyed, atomic, self-checking, and clear about a compiler that does not work."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from daceml_train.errors import CompilerError
from daceml_train.runtime.native_build import build, is_intact

pytestmark = pytest.mark.compiled


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int answer = 42;\n")
    path = folder / "answer.cpp"
    path.write_text(
        '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int get() { return answer; }\n'
    )
    return path


def test_builds_once_and_loads(source: Path, tmp_path: Path) -> None:
    path = build(source, tmp_path / "cache")
    inode = path.stat().st_ino
    assert ctypes.CDLL(str(path)).get() == 42
    assert build(source, tmp_path / "cache") == path and path.stat().st_ino == inode


def test_a_changed_header_is_another_library(source: Path, tmp_path: Path) -> None:
    before = build(source, tmp_path / "cache")
    (source.parent / "answer.h").write_text("constexpr int answer = 43;\n")
    after = build(source, tmp_path / "cache")
    assert after != before
    assert ctypes.CDLL(str(after)).get() == 43


@pytest.mark.parametrize(
    "damage", [lambda content: content[:100], lambda content: b"", lambda c: c[:-40] + b"x" + c[-39:]]
)
def test_a_damaged_library_is_rebuilt(source: Path, tmp_path: Path, damage) -> None:
    path = build(source, tmp_path / "cache")
    path.write_bytes(damage(path.read_bytes()))
    assert not is_intact(path)
    assert build(source, tmp_path / "cache") == path
    assert is_intact(path)
    assert ctypes.CDLL(str(path)).get() == 42


def test_a_missing_compiler_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match="'no-such-compiler' cannot be started"):
        build(source, tmp_path / "cache", compiler="no-such-compiler")


def test_a_failing_compiler_shows_its_diagnostics_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("this is no C++;\n")
    with pytest.raises(CompilerError, match=r"failed with status 1:(.|\n)*error: expected unqualified-id"):
        build(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_processes_may_build_at_once(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from daceml_train.runtime.native_build import build\n"
        "import ctypes; path = build(Path(sys.argv[1]), Path(sys.argv[2])); print(ctypes.CDLL(str(path)).get())"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "cache")]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    (library,) = (tmp_path / "cache").iterdir()
    assert is_intact(library)
