"""Checkpoints under faults: damage, a full disk, another process, and what a file may contain."""

import errno
import warnings
from pathlib import Path

import pytest
import torch

import daceml_train as dt
from daceml_train.storage import files
from daceml_train.trials import checkpoints
from daceml_train.trials.checkpoints import Store
from daceml_train.trials.values import same
from tests.trials.net import TRIALS, stages
from tests.trials.test_stages import equal_to_alone

STATE = {"tensors": {"a": torch.arange(4.0)}, "list": [1, 2.5, "x", None, (3,)], "empty": {}}
POINT = (5, "ab12")


def test_a_point_survives_its_process(tmp_path: Path) -> None:
    Store("root", tmp_path, 1000).save(POINT, STATE, 0)
    other = Store("root", tmp_path, 1000)
    assert other.steps() == [5] and other.has(POINT)
    assert same(other.load(POINT, 0), STATE)
    assert not Store("other", tmp_path, 1000).has(POINT)


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    store = Store("root", tmp_path, 1000)
    store.save(POINT, STATE, 3)
    file = store._file(POINT)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
    file.write_bytes(content)
    if damage == "foreign":
        file.chmod(0o666)
    with pytest.warns(UserWarning, match="trial 7 after 5 steps is damaged"):
        assert Store("root", tmp_path, 1000).load(POINT, 7) is None
    assert not Store("root", tmp_path, 1000).has(POINT)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    import io

    class Evil:
        def __reduce__(self) -> object:
            return print, ("executed",)

    store, buffer = Store("root", tmp_path, 1000), io.BytesIO()
    torch.save({"tensors": Evil()}, buffer)
    file = store._file(POINT)
    files.replace(file, files.sealed(buffer.getvalue(), file.name))
    with pytest.warns(UserWarning, match="is damaged"):
        assert store.load(POINT, 0) is None


def test_memory_is_limited() -> None:
    store = Store("root", None, 100)
    for step in range(5):
        store.save((step, "k"), {"t": torch.zeros(10)}, 0)
    assert store.steps() == [4, 3]


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    first, second = Store("root", tmp_path, 1000), Store("root", tmp_path / ".." / tmp_path.name, 1000)
    with first.lock(POINT), second.lock_at_once((6, "k")) as free:
        assert free
    with first.lock_at_once(POINT) as free:
        assert free


def test_a_storage_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(dt.Invalid, match="cannot be used"):
        Store("root", tmp_path / "file", 1000)


@pytest.mark.compiled
def test_two_studies_share_a_storage(tmp_path: Path) -> None:
    first, second = stages(tmp_path, seed=0), stages(tmp_path, seed=0)
    values = first.run_all(TRIALS[:4], 12)
    assert second.run_all(TRIALS[:4], 12) == values
    assert second.report().steps == first.tree.steps()
    more = second.run_all(TRIALS, 12)
    equal_to_alone(second, TRIALS, more)
    assert second.report().steps == second.tree.steps()


@pytest.mark.compiled
@pytest.mark.parametrize("removable", [True, False])
def test_a_damaged_checkpoint_costs_its_stage(tmp_path: Path, removable: bool) -> None:
    first = stages(tmp_path, seed=0)
    first.run_all(TRIALS[:2], 12)
    fork = first.path(TRIALS[0], 12)
    file = first.store._file((9, fork.key(9)))
    if removable:
        file.write_bytes(file.read_bytes()[:-40])
    else:
        file.unlink()
        file.mkdir()
    second = stages(tmp_path, seed=0)
    third = {"lr": dt.schedule.steps(0.1, {6: 0.5, 9: 0.3})}
    with pytest.warns(UserWarning, match="after 9 steps is damaged"):
        values = second.run_all([TRIALS[0], third], 12)
    equal_to_alone(second, [TRIALS[0], third], values)


@pytest.mark.compiled
def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, wrote = stages(tmp_path, seed=0), []

    def full(path: Path, content: bytes, mode: int = 0o600) -> None:
        wrote.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "replace", full)
    with pytest.warns(UserWarning, match=r"trial 0 after .* cannot be written .*No space left") as caught:
        values = found.run_all(TRIALS[:4], 12)
    assert len(caught) == 1 and wrote
    equal_to_alone(found, TRIALS[:4], values)
    assert "checkpoints could not be written" in str(found.report())
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stages(tmp_path, seed=0).run_all(TRIALS[:4], 12) == values
