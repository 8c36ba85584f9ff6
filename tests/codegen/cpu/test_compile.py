"""Compiling into the cache folder: only what is missing, whole or not at all, with errors that say what to do."""

import multiprocessing

import pytest

from daceml_train.codegen.cpu import compile as compiling
from daceml_train.codegen.cpu.compile import build, compile_kernels, library_path, load
from daceml_train.errors import CompilerError
from daceml_train.tensor import Tensor
from tests.codegen.test_keys import code_of

pytestmark = pytest.mark.compiled


def some_code(i: int = 0):
    kinds = ["neg", "abs", "square", "sqrt"]
    return code_of(lambda x: x.unary(kinds[i]), Tensor((8, 32)))[1]


def test_only_missing_libraries_are_made(tmp_path, monkeypatch):
    codes = [some_code(i) for i in (0, 1, 0)]
    seen = []
    first = compile_kernels(codes, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)] and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        p.name for p in first.values()
    )
    monkeypatch.setattr(compiling, "build", lambda *_: pytest.fail("compiled again"))
    assert compile_kernels([some_code(0), some_code(1)], tmp_path) == first


def test_a_corrupt_library_is_rebuilt(tmp_path):
    code = some_code()
    path = compile_kernels([code], tmp_path)[code.key]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert compile_kernels([code], tmp_path)[code.key].read_bytes()[-8:] == whole[-8:]
    assert load(path, code.key) > 0


def test_a_missing_compiler_is_named(tmp_path):
    with pytest.raises(CompilerError, match=r"'no-such-g\+\+' cannot be started.*install g\+\+ or set CXX"):
        compile_kernels([some_code()], tmp_path, compiler="no-such-g++")


def test_a_failing_compiler_is_quoted(tmp_path):
    with pytest.raises(CompilerError, match="does_not_exist"):
        build("int main() { return does_not_exist; }", tmp_path / "kernel_x.so")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_library_is_named(tmp_path):
    path = tmp_path / "x.so"
    path.write_text("no library")
    with pytest.raises(CompilerError, match="is not a library of kernel k"):
        load(path, "k")


def _compile(folder):
    compile_kernels([some_code(i) for i in range(3)], folder)


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_compile, args=(tmp_path,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0, 0]
    for i in range(3):
        assert load(library_path(some_code(i).key, tmp_path), some_code(i).key) > 0
    assert len(list(tmp_path.iterdir())) == 3
