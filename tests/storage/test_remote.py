"""The remote cache: signed entries under any file system of fsspec; nothing that others may have written is used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from daceml_train.errors import Invalid
from daceml_train.storage import remote, trust
from daceml_train.storage.files import sealed, unsealed
from daceml_train.storage.turns import build_once

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    key = tmp_path / "key"
    key.write_bytes(SECRET + b"\n")
    key.chmod(0o600)
    url = f"{request.param}://{tmp_path}/common/cache"
    monkeypatch.setenv(remote.REMOTE, url)
    monkeypatch.setenv(remote.KEY, str(key))
    monkeypatch.setattr(trust, "_warned", set())
    monkeypatch.setattr(remote, "_unreachable", set())
    remote._opened.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield url
    remote._opened.cache_clear()


def host(folder: Path) -> Path:
    """The path of an entry in the cache of a host."""
    path = folder / "kernels" / "kernel_1.so"
    path.parent.mkdir(parents=True)
    return path


def built(path: Path, content: bytes = b"text") -> tuple[bytes, bool]:
    """The entry, and whether it was built."""
    begun = []

    def build() -> bytes:
        begun.append(True)
        path.write_bytes(sealed(content, path.name))
        return content

    return build_once(path, lambda: unsealed(path), build), bool(begun)


def entries(url: str) -> dict[str, bytes]:
    files, folder = fsspec.core.url_to_fs(url)
    return {name: files.cat_file(name) for name in files.find(folder)}


def test_one_host_builds_and_the_others_fetch(url: str, tmp_path: Path) -> None:
    assert built(host(tmp_path / "first")) == (b"text", True)
    assert [name.rpartition("/cache/")[2] for name in entries(url)] == ["kernels/kernel_1.so"]
    second = host(tmp_path / "second")
    assert built(second) == (b"text", False)
    assert second.stat().st_mode & 0o777 == 0o700
    assert built(second) == (b"text", False)


def test_an_entry_is_written_once(url: str, tmp_path: Path) -> None:
    first = host(tmp_path / "first")
    built(first)
    before = entries(url)
    first.write_bytes(sealed(b"other", first.name))
    remote.store(first)
    assert entries(url) == before


@pytest.mark.parametrize("damage", ["content", "signature", "short", "unsigned", "name"])
def test_what_is_not_signed_is_built(url: str, tmp_path: Path, damage: str) -> None:
    built(host(tmp_path / "first"))
    files, _ = fsspec.core.url_to_fs(url)
    [(name, whole)] = entries(url).items()
    if damage == "name":  # a signed entry under the name of another one
        files.pipe_file(name.replace("kernel_1", "kernel_2"), whole)
        path = host(tmp_path / "second").with_name("kernel_2.so")
    else:
        path = host(tmp_path / "second")
        forged = sealed(b"evil", path.name)
        files.pipe_file(
            name,
            {
                "content": forged + whole[len(forged) :],
                "signature": whole[:-1] + bytes([whole[-1] ^ 1]),
                "short": whole[:5],
                "unsigned": forged,
            }[damage],
        )
    with pytest.warns(UserWarning, match="does not use kernels/kernel_.* another secret than that of"):
        assert built(path, b"own") == (b"own", True)


def test_another_secret_is_another_cache(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(host(tmp_path / "first"))
    (tmp_path / "key").write_bytes(SECRET[::-1])
    remote._opened.cache_clear()
    with pytest.warns(UserWarning, match="another secret"):
        assert built(host(tmp_path / "second"), b"own") == (b"own", True)


def test_a_remote_cache_that_fails_is_one_warning(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(*args: object, **options: object) -> None:
        asked.append(args)
        raise ConnectionError("no route to the bucket")

    files, _ = fsspec.core.url_to_fs(url)
    monkeypatch.setattr(type(files), "cat_file", fail)
    with pytest.warns(UserWarning, match="ConnectionError: no route to the bucket.*goes on without it"):
        assert built(host(tmp_path / "first")) == (b"text", True)
    assert built(host(tmp_path / "second")) == (b"text", True)
    assert len(asked) == 1


def test_a_write_that_fails_is_one_warning(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise PermissionError("read only")

    files, _ = fsspec.core.url_to_fs(url)
    monkeypatch.setattr(type(files), "pipe_file", fail)
    with pytest.warns(UserWarning, match="PermissionError: read only"):
        assert built(host(tmp_path / "first")) == (b"text", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda env, key: env.delenv(remote.KEY), "without \\$DACEML_TRAIN_REMOTE_CACHE_KEY"),
        (lambda env, key: key.unlink(), "cannot be read: .*No such file"),
        (lambda env, key: key.chmod(0o640), "can be read or written by others"),
        (lambda env, key: key.write_text("short"), "less than 16 bytes"),
        (lambda env, key: env.setenv(remote.REMOTE, "nothing://bucket"), "nothing://bucket .*cannot be opened"),
    ],
)
def test_what_cannot_be_meant_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: object, message: str
) -> None:
    change(monkeypatch, tmp_path / "key")  # type: ignore[operator]
    with pytest.raises(Invalid, match=message):
        remote.remote_cache()


def test_without_a_name_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(remote.REMOTE, raising=False)
    assert remote.remote_cache() is None and not remote.fetch(tmp_path / "kernels" / "k")
