"""`radixlink store` as it is typed, on a store that is really there."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest

from radixlink import main
from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store import FileStoreFactory, file_stores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from radixlink_contracts import PageStore

LAYOUT = PoolLayout(
    identity=CacheIdentity(
        model="a model",
        revision="r7",
        dtype="float16",
        page_size=16,
        num_layers=2,
        layout="k|v",
    ),
    pool=PoolName.KV,
    range_bytes=(96, 32),
)
KEYS = PageKeys(bytes(range(96)))
NAME = "kv.0-of-1.segment"


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[FileStoreFactory]:
    """Opens the store of the test's directory."""
    factory = FileStoreFactory(StoreConfig(location=str(tmp_path), capacity_bytes=1280))
    yield factory
    factory.close()


@pytest.fixture
def store(factory: FileStoreFactory) -> PageStore:
    """A store of ten pages, with three in it."""
    store = factory.open(LAYOUT)
    assert store.put(KEYS, [b"k" * 3 * 96, b"v" * 3 * 32]).complete
    return store


def test_inspect_tells_whose_pages_there_are_and_how_many(
    store: PageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.read(store.open(KEYS, 0), 0, bytearray(3 * 96))
    assert main(["store", "inspect", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for part in (
        str(tmp_path / NAME),
        "a model, revision r7, float16",
        "16 tokens a page, 2 layers",
        "pool kv, shard 0 of 1, 128 bytes in 2 layer ranges, checksums on",
        "3 of 10 pages (30%), 0 leased, 0 unfinished",
        "1 openers",
        "100% of the layer ranges",
        "put 3,",
        "read_ok 3,",
    ):
        assert part in told


def test_verify_of_a_sound_store_and_of_a_damaged_one(
    factory: FileStoreFactory,
    store: PageStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["store", "verify", str(tmp_path)]) == 0
    assert "3 pages, 0 damaged" in capsys.readouterr().out
    factory.close()
    content = (tmp_path / NAME).read_bytes()
    assert content.count(b"k" * 96 + b"v" * 32) == 3
    (tmp_path / NAME).write_bytes(content.replace(b"k" * 96, b"k" * 95 + b"K"))
    assert main(["store", "verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "3 pages, 3 damaged" in told
    assert told.count("layer range 0; emptied") == 3
    assert main(["store", "verify", str(tmp_path)]) == 0
    assert "0 pages, 0 damaged" in capsys.readouterr().out


def test_clear_empties_a_store_in_use_and_removes_one_that_is_not(
    factory: FileStoreFactory,
    store: PageStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["store", "clear", str(tmp_path)]) == 0
    assert "3 pages, emptied; the file stays" in capsys.readouterr().out
    assert store.contains(KEYS).total == 0
    factory.close()
    assert main(["store", "clear", str(tmp_path)]) == 0
    assert "0 pages, removed" in capsys.readouterr().out
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("action", ["inspect", "verify", "clear"])
def test_empty_path_is_not_the_current_directory(
    store: PageStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["store", action, ""])
    assert ended.value.code == 2
    assert "expected a path, got an empty one" in capsys.readouterr().err
    assert store.contains(KEYS).complete


def test_what_the_terminal_cannot_show_is_told_in_another_way(
    store: PageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "\u00fc.segment").touch()
    (tmp_path / "\udcff.segment").touch()
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    assert main(["store", "inspect", str(tmp_path)]) == 1
    for part in (b"3 of 10 pages", b"\\xfc.segment: left alone", b"\\udcff.segment: left alone"):
        assert part in printed.getvalue()
    assert store.contains(KEYS).complete


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory of a persistent tier, with three pages in it."""
    files = tmp_path / "files"
    config = StoreConfig(
        location=str(tmp_path / "memory"),
        capacity_bytes=1280,
        persistent_path=str(files),
        persistent_bytes=1 << 20,
    )
    factory = file_stores(config)
    assert factory.open(LAYOUT).put(KEYS, [b"k" * 3 * 96, b"v" * 3 * 32]).complete
    factory.close()
    return files


def test_files_of_a_persistent_tier_are_looked_after_too(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "inspect", str(files)]) == 0
    told = capsys.readouterr().out
    for part in (
        f"{files}: 1 files of pages of a model, pool kv, shard 0 of 1",
        "a model, revision r7, float16",
        "128 bytes in 2 layer ranges",
        "3 records of 3 pages, 0 torn",
        "1, of which 0 not sealed",
    ):
        assert part in told
    assert main(["store", "verify", str(files)]) == 0
    assert "3 records, 0 damaged, 0 torn" in capsys.readouterr().out
    assert main(["store", "clear", str(files)]) == 0
    assert "3 records, removed" in capsys.readouterr().out
    assert list(files.iterdir()) == []


def test_verify_names_damaged_records_and_fails(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = files.iterdir()
    content = path.read_bytes()
    assert content.count(b"k" * 96 + b"v" * 32) == 3
    path.chmod(0o600)
    path.write_bytes(content.replace(b"v" * 32, b"v" * 31 + b"V"))
    path.chmod(0o400)
    for _ in range(2):
        assert main(["store", "verify", str(files)]) == 1
        told = capsys.readouterr().out
        assert "3 records, 3 damaged, 0 torn" in told
        assert f"{path.name}, record 2: layer range 1" in told


@pytest.mark.parametrize("action", ["inspect", "verify", "clear"])
def test_foreign_file_is_left_alone_and_fails_the_command(
    store: PageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    foreign = tmp_path / "other.segment"
    foreign.write_bytes(b"my thesis\n" * 1000)
    assert main(["store", action, str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert f"{foreign}: left alone" in told
    assert NAME in told
    assert foreign.read_bytes() == b"my thesis\n" * 1000


def test_place_without_a_store_ends_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "inspect", str(tmp_path / "none")]) == 7
    told = capsys.readouterr().err
    assert str(tmp_path / "none") in told
    assert "Traceback" not in told


@pytest.mark.parametrize("action", ["inspect", "verify", "clear"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none", "none: expected a directory, got a path that does not exist"),
        ("file", "file: expected a directory, got a path that is a file"),
        ("file/below", "file/below: expected a directory, got: "),
    ],
)
def test_path_that_is_no_directory_is_told_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, name: str, told: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    assert main(["store", action, str(tmp_path / name)]) == 7
    printed = capsys.readouterr().err
    assert f"store {action} {tmp_path}" in printed
    assert told in printed


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["burn", "."]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["store", *arguments])
    assert ended.value.code == 2
