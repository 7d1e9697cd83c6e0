from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from array import array

import attrs
import pytest

from radixlink_contracts import (
    CacheIdentity,
    PageBits,
    PageHandles,
    PageKeys,
    PoolLayout,
    PoolName,
    Shard,
    StoreConfig,
)
from radixlink_contracts.errors import ContractError

IDENTITY = CacheIdentity(
    model="tiny-llama",
    revision="0123abcd",
    dtype="float32",
    page_size=16,
    num_layers=2,
    layout="k|v;heads=3;dim=64",
)
LAYOUT = PoolLayout(
    identity=IDENTITY,
    pool=PoolName.KV,
    shard=Shard(index=1, count=2),
    range_bytes=(24576, 24576),
)

#: Stores on disk carry these: a change of them makes every store there is another model's.
IDENTITY_FINGERPRINT = "8d6f5c233c9a336cc201c8d0622b3d25e5febaabf834d38eb814fe8ac9a83d8e"
LAYOUT_FINGERPRINT = "5b8c37140a1b35bc946b03ffdb716c159c1da07fa46f530c2e599a85ee341c7b"

OTHER_IDENTITIES = {
    "model": attrs.evolve(IDENTITY, model="tiny-llama-2"),
    "revision": attrs.evolve(IDENTITY, revision="0123abce"),
    "dtype": attrs.evolve(IDENTITY, dtype="bfloat16"),
    "page_size": attrs.evolve(IDENTITY, page_size=32),
    "num_layers": attrs.evolve(IDENTITY, num_layers=3),
    "layout": attrs.evolve(IDENTITY, layout="k|v;heads=1;dim=192"),
}
OTHER_LAYOUTS = {
    "identity": attrs.evolve(LAYOUT, identity=OTHER_IDENTITIES["model"]),
    "pool": attrs.evolve(LAYOUT, pool=PoolName.SWA),
    "shard": attrs.evolve(LAYOUT, shard=Shard(index=0, count=2)),
    "range_bytes": attrs.evolve(LAYOUT, range_bytes=(24576, 24577)),
}


def framed(*fields: str | bytes) -> str:
    """The rule in words of its own: SHA-256 of the fields, each behind its length."""
    encoded = [field.encode() if isinstance(field, str) else field for field in fields]
    return hashlib.sha256(
        b"".join(len(field).to_bytes(8, "little") + field for field in encoded)
    ).hexdigest()


def test_fingerprints_stay_what_they_are() -> None:
    assert IDENTITY.fingerprint.hex() == IDENTITY_FINGERPRINT
    assert LAYOUT.fingerprint.hex() == LAYOUT_FINGERPRINT
    assert (
        framed(
            "radixlink-identity-v1",
            "tiny-llama",
            "0123abcd",
            "float32",
            "16",
            "2",
            "k|v;heads=3;dim=64",
        )
        == IDENTITY_FINGERPRINT
    )
    assert (
        framed("radixlink-layout-v1", IDENTITY.fingerprint, "kv", "1", "2", "24576,24576")
        == LAYOUT_FINGERPRINT
    )


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(CacheIdentity)])
def test_each_field_of_an_identity_changes_its_fingerprint(field: str) -> None:
    other = OTHER_IDENTITIES[field]
    assert other != IDENTITY
    assert other.fingerprint != IDENTITY.fingerprint
    assert attrs.evolve(LAYOUT, identity=other).fingerprint != LAYOUT.fingerprint


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(PoolLayout)])
def test_each_field_of_a_layout_changes_its_fingerprint(field: str) -> None:
    other = OTHER_LAYOUTS[field]
    assert other != LAYOUT
    assert other.fingerprint != LAYOUT.fingerprint


def test_the_number_of_shards_changes_the_fingerprint() -> None:
    other = attrs.evolve(LAYOUT, shard=Shard(index=1, count=4))
    assert other.fingerprint != LAYOUT.fingerprint


def test_characters_cannot_move_from_one_field_to_the_next() -> None:
    moved = attrs.evolve(IDENTITY, model="tiny-llama0", revision="123abcd")
    assert moved.fingerprint != IDENTITY.fingerprint
    joined = attrs.evolve(LAYOUT, range_bytes=(2457624576,))
    assert joined.fingerprint != LAYOUT.fingerprint


def test_equal_values_have_equal_fingerprints() -> None:
    twin = attrs.evolve(LAYOUT, identity=attrs.evolve(IDENTITY))
    assert twin is not LAYOUT
    assert twin == LAYOUT
    assert twin.fingerprint == LAYOUT.fingerprint


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_other_hashes_has_the_same_fingerprints(seed: str) -> None:
    program = (
        "from radixlink_contracts import CacheIdentity, PoolLayout, PoolName, Shard\n"
        f"identity = {IDENTITY!r}\n"
        "layout = PoolLayout(identity=identity, pool=PoolName.KV,"
        " shard=Shard(index=1, count=2), range_bytes=(24576, 24576))\n"
        "print(identity.fingerprint.hex(), layout.fingerprint.hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [IDENTITY_FINGERPRINT, LAYOUT_FINGERPRINT]


@pytest.mark.parametrize("field", ["model", "revision", "dtype", "layout"])
def test_an_identity_with_an_unknown_is_refused(field: str) -> None:
    values = {**attrs.asdict(IDENTITY), field: ""}
    with pytest.raises(ContractError, match=f"expected {field} to be known"):
        CacheIdentity(**values)


@pytest.mark.parametrize("field", ["model", "revision", "dtype", "layout"])
def test_an_identity_that_has_no_fingerprint_is_refused(field: str) -> None:
    # So Python writes the name of a file that is no UTF-8.
    with pytest.raises(ContractError, match=rf"{field} to have a form in UTF-8, got 'x\\udcff'"):
        CacheIdentity(**{**attrs.asdict(IDENTITY), field: "x\udcff"})


@pytest.mark.parametrize("field", ["page_size", "num_layers"])
@pytest.mark.parametrize("value", [0, -1])
def test_an_identity_has_pages_and_layers(field: str, value: int) -> None:
    values = {**attrs.asdict(IDENTITY), field: value}
    with pytest.raises(ContractError, match="at least 1"):
        CacheIdentity(**values)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_is_one_of_its_count(index: int, count: int) -> None:
    with pytest.raises(ContractError, match=rf"0\.\.{count - 1}, got {index}"):
        Shard(index=index, count=count)


@pytest.mark.parametrize("range_bytes", [(), (8, 0), (-8, 8)])
def test_a_layout_has_bytes_in_every_range(range_bytes: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="layer ranges of at least 1 byte"):
        attrs.evolve(LAYOUT, range_bytes=range_bytes)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -0.1])
def test_opening_a_store_has_a_deadline(timeout_s: float) -> None:
    with pytest.raises(ContractError, match=f"finite timeout_s of at least 0, got {timeout_s}"):
        StoreConfig(timeout_s=timeout_s)


@pytest.mark.parametrize("size", ["capacity_bytes", "persistent_bytes"])
def test_a_store_has_no_less_room_than_none(size: str) -> None:
    with pytest.raises(ContractError, match=f"{size}=-1"):
        StoreConfig(**{size: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["location", "persistent_path"])
def test_a_store_is_where_a_system_has_places(field: str) -> None:
    with pytest.raises(ContractError, match=rf"{field} without a null character, got '/a\\x00b'"):
        StoreConfig(**{field: "/a\0b"})  # type: ignore[arg-type]


def test_a_page_is_the_sum_of_its_ranges() -> None:
    assert attrs.evolve(LAYOUT, range_bytes=(3, 5, 7)).page_bytes == 15


def test_handles_without_a_place_have_zeros_in_every_column() -> None:
    keys, found = PageKeys(bytes(96)), PageBits.of([0, 2], 3)
    handles = PageHandles.without_places(keys, found)
    assert (handles.keys, handles.found) == (keys, found)
    for column in (handles.slots, handles.generations, handles.writers):
        assert column == array("Q", [0, 0, 0])


@pytest.mark.parametrize("column", ["found", "slots", "generations", "writers"])
def test_handles_have_a_row_for_each_page(column: str) -> None:
    handles = PageHandles.without_places(PageKeys(bytes(96)), PageBits.all(3))
    short = PageBits.all(2) if column == "found" else array("Q", [0, 0])
    values = {name: getattr(handles, name) for name in ("keys", "found", "slots")}
    values |= {name: getattr(handles, name) for name in ("generations", "writers")}
    with pytest.raises(ContractError, match="expected 3 rows in each column"):
        PageHandles(**{**values, column: short})
