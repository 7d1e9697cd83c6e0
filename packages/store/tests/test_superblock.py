from __future__ import annotations

import attrs
import pytest

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName, Shard
from radixlink_contracts.errors import ContractError, IdentityError, IntegrityError
from radixlink_store._layout import SUPERBLOCK_BYTES
from radixlink_store._superblock import write_boot_id
from radixlink_store.segments import Geometry, Superblock, differences

IDENTITY = CacheIdentity(
    model="a model", revision="r1", dtype="float32", page_size=16, num_layers=2, layout="k|v"
)
LAYOUT = PoolLayout(
    identity=IDENTITY, pool=PoolName.SWA, shard=Shard(index=1, count=4), range_bytes=(64, 100)
)
SUPERBLOCK = Superblock(
    layout=LAYOUT, geometry=Geometry.within(1 << 20, LAYOUT.range_bytes), boot_id="b" * 36
)


@pytest.fixture
def written() -> bytearray:
    """The bytes of a superblock."""
    buffer = bytearray(SUPERBLOCK_BYTES)
    SUPERBLOCK.write(memoryview(buffer))
    return buffer


def test_reads_what_was_written(written: bytearray) -> None:
    assert Superblock.read(bytes(written), "there") == SUPERBLOCK


def test_whether_there_are_checksums_is_read_back() -> None:
    buffer = bytearray(SUPERBLOCK_BYTES)
    without = attrs.evolve(SUPERBLOCK, checksums=False)
    without.write(memoryview(buffer))
    assert Superblock.read(bytes(buffer), "there") == without


def test_boot_id_may_be_written_again(written: bytearray) -> None:
    write_boot_id(memoryview(written), "another")
    expected = attrs.evolve(SUPERBLOCK, boot_id="another")
    assert Superblock.read(bytes(written), "there") == expected


@pytest.mark.parametrize("head", [b"", b"RDX", b"\x7fELF" + bytes(SUPERBLOCK_BYTES)])
def test_file_of_something_else_is_refused(head: bytes) -> None:
    with pytest.raises(IdentityError, match="there: expected a page segment"):
        Superblock.read(head, "there")


def test_shortened_superblock_is_refused(written: bytearray) -> None:
    with pytest.raises(IntegrityError, match="truncated"):
        Superblock.read(bytes(written[:-1]), "there")


def test_another_format_version_is_refused(written: bytearray) -> None:
    written[8] += 1
    with pytest.raises(IdentityError, match="format version 2, got 3"):
        Superblock.read(bytes(written), "there")


def test_another_byte_order_is_refused(written: bytearray) -> None:
    written[12:16] = written[12:16][::-1]
    with pytest.raises(IdentityError, match="byte order"):
        Superblock.read(bytes(written), "there")


@pytest.mark.parametrize("place", [64, 80, 110, 140, SUPERBLOCK_BYTES - 1])
def test_damage_is_seen(written: bytearray, place: int) -> None:
    written[place] ^= 1
    with pytest.raises(IntegrityError):
        Superblock.read(bytes(written), "there")


def test_unfinished_one_is_refused(written: bytearray) -> None:
    written[16] = 0
    with pytest.raises(IntegrityError, match="ready=0"):
        Superblock.read(bytes(written), "there")


def test_layout_that_does_not_fit_is_refused() -> None:
    identity = attrs.evolve(IDENTITY, layout="x" * SUPERBLOCK_BYTES)
    superblock = attrs.evolve(SUPERBLOCK, layout=attrs.evolve(LAYOUT, identity=identity))
    with pytest.raises(ContractError, match="in JSON"):
        superblock.write(memoryview(bytearray(SUPERBLOCK_BYTES)))


def test_differences_name_only_what_differs() -> None:
    other = attrs.evolve(LAYOUT, shard=Shard(index=0, count=4))
    assert differences(LAYOUT, other) == "shard is [1, 4] there and [0, 4] here"


def test_differences_of_two_identities_leave_the_pools_out() -> None:
    identity = attrs.evolve(IDENTITY, revision="r2", dtype="bfloat16")
    other = PoolLayout(identity=identity, pool=PoolName.KV, range_bytes=(1,))
    expected = "revision is 'r1' there and 'r2' here, dtype is 'float32' there and 'bfloat16' here"
    assert differences(LAYOUT, other) == expected
