"""What others may have written is not run: it is refused by name, and rebuilt."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from daceml_train.codegen.cpu.compile import compile_kernels, intact, load
from daceml_train.driver.compiled_before import known, remember
from daceml_train.errors import Invalid
from daceml_train.runtime.cache import Cache
from daceml_train.runtime.native_build import build
from daceml_train.storage import folders, trust
from daceml_train.storage.files import keep, sealed, unsealed
from daceml_train.storage.folders import cache_folder, clear_dead, locked, make, to_write, usable
from daceml_train.storage.trust import distrust
from tests.codegen.cpu.test_compile import some_code

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def warnings_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_warned", set())


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_new_folders_are_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = make(tmp_path / "a" / "b")
        keep(folder / "c" / "file", b"content")
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (folder.parent, folder, folder / "c")] == [0o700] * 3
    assert (folder / "c" / "file").stat().st_mode & 0o777 == 0o600


def test_the_steps_of_earlier_runs_are_kept_under_any_umask(tmp_path: Path) -> None:
    before, cache = os.umask(0o002), Cache(tmp_path / "cache")
    try:
        for step in ("one", "other"):
            remember(cache, step)
    finally:
        os.umask(before)
    assert known(cache, "one") and known(cache, "other")
    assert (cache.folder / "steps").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    folder = make(tmp_path / "kernels")
    assert usable(folder) == folder
    folder.chmod(mode)
    with pytest.warns(UserWarning, match=f"{folder}.*writable by others"):
        other = usable(folder)
    assert other != folder and to_write(folder).stat().st_mode & 0o777 == 0o700
    assert folders.private() in other.parents


@as_root
def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    folder = make(tmp_path / "kernels")
    os.chown(folder, 4321, 4321)
    with pytest.warns(UserWarning, match="belongs to another user .number 4321"):
        assert usable(folder) != folder


def test_a_folder_below_one_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "open" / "cache")
    folder.parent.chmod(0o777)
    assert str(folder.parent) in distrust(folder)
    folder.parent.chmod(0o1777)
    assert distrust(folder) == ""


@pytest.mark.parametrize(
    "change", [lambda p: p.chmod(0o666), pytest.param(lambda p: os.chown(p, 4321, -1), marks=as_root)]
)
def test_a_file_of_others_is_not_unpickled(tmp_path: Path, change) -> None:
    cache, mark = Cache(tmp_path), tmp_path / "executed"
    path = make(tmp_path / "programs") / "key.program"
    path.write_bytes(sealed(pickle.dumps(Payload(mark)), path.name))
    change(path)
    with pytest.warns(UserWarning, match=f"does not use.*{path.name}"):
        assert cache.load("key") is None
    assert not mark.exists()


@pytest.mark.compiled
def test_a_library_of_others_is_made_anew(tmp_path: Path) -> None:
    code = some_code()
    path = compile_kernels([code], tmp_path)[code.key]
    path.chmod(0o777)
    inode = path.stat().st_ino
    with pytest.warns(UserWarning, match="writable by others"):
        assert compile_kernels([code], tmp_path)[code.key] == path
    assert intact(path) and path.stat().st_ino != inode


@pytest.mark.compiled
def test_kernels_of_a_refused_folder_are_built_elsewhere(tmp_path: Path) -> None:
    folder, code = make(tmp_path / "kernels"), some_code()
    planted = folder / compile_kernels([code], folder)[code.key].name
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="cannot use its cache"):
        path = compile_kernels([code], folder)[code.key]
    assert path != planted and load(path, code.key)


@pytest.mark.compiled
def test_a_library_under_another_kernels_name_is_made_anew(tmp_path: Path) -> None:
    first, second = some_code(0), some_code(1)
    paths = compile_kernels([first, second], tmp_path)
    os.replace(paths[first.key], paths[second.key])
    assert not intact(paths[second.key])
    assert load(compile_kernels([second], tmp_path)[second.key], second.key)


@pytest.mark.compiled
def test_a_native_library_under_another_name_is_made_anew(tmp_path: Path) -> None:
    texts = {"one": 1, "two": 2}
    for name, value in texts.items():
        (tmp_path / f"{name}.cpp").write_text(
            f'extern "C" __attribute__((visibility("default"))) int get() {{ return {value}; }}'
        )
    one, two = (build(tmp_path / f"{name}.cpp", tmp_path / "native") for name in texts)
    os.replace(one, two)
    assert unsealed(two) is None
    assert build(tmp_path / "two.cpp", tmp_path / "native") == two and unsealed(two)


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(folders.CACHE, str(file / "below"))
    with pytest.raises(Invalid, match=r"DACEML_TRAIN_CACHE.*is not a folder: .*/file is a file"):
        cache_folder()
    with pytest.raises(Invalid, match="is not a folder"):
        cache_folder(file)


def test_the_home_folder_is_expanded_wherever_the_cache_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(folders.CACHE, "~/a")
    assert cache_folder() == tmp_path / "a" and cache_folder("~/b") == tmp_path / "b"
    monkeypatch.delenv(folders.CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "~/c")
    assert cache_folder() == tmp_path / "c" / "daceml_train"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user number without an entry in the list of users, and without $HOME, in an empty folder."""

    def unknown(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", folders.CACHE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_user_without_a_home_folder_has_the_cache_in_the_temporary_one(homeless: Path) -> None:
    folder = cache_folder()
    assert folder == homeless / "temporary" / f"daceml_train-{os.geteuid()}"
    assert usable(folder) == folder and folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in homeless.iterdir()] == ["temporary"]


def test_a_cache_in_a_home_folder_that_nobody_has_is_refused(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match="cache is ~/a, and ~ has no home folder; name it in full"):
        cache_folder("~/a")
    monkeypatch.setenv(folders.CACHE, "~/b")
    with pytest.raises(Invalid, match="DACEML_TRAIN_CACHE is ~/b, and ~ has no home folder"):
        cache_folder()


def test_what_a_killed_build_left_is_cleared(tmp_path: Path) -> None:
    kernels = make(tmp_path / "kernels")
    script = (
        "import os, sys, signal; from pathlib import Path; from daceml_train.storage.folders import locked\n"
        "with locked(Path(sys.argv[1])) as f:\n (f / 'half.so').write_bytes(bytes(999)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(kernels)], cwd=Path(__file__).parents[2])
    (left,) = kernels.iterdir()
    old = kernels / ".building-none"  # killed between the folder and its lock
    old.mkdir()
    os.utime(old, (time.time() - 999,) * 2)
    stale = kernels / ".partial-x"
    stale.write_text("half")
    os.utime(stale, (0, 0))
    with locked(kernels) as alive:
        Cache(tmp_path).evict()
        assert list(kernels.iterdir()) == [alive] and not left.exists()
        assert clear_dead(kernels) == 0
    assert list(kernels.iterdir()) == []


def test_a_build_that_has_not_locked_its_folder_yet_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            assert clear_dead(tmp_path) == 0 and len(list(tmp_path.iterdir())) == 1
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path) as folder:
        assert folder.is_dir() and clear_dead(tmp_path) == 0


def test_a_failed_write_leaves_nothing_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="cannot write its cache.*No space left"):
        keep(tmp_path / "file", b"content")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        keep(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_where_warnings_are_errors_the_cache_logs_them_and_compilation_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path / "kernels")
    folder.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usable(folder) == usable(folder) != folder
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "cannot use its cache" in record.message
