"""What the kernel says of a mapping before and after."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radixlink_store._prefault import Prefault

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_BYTES = 5 << 20


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[mmap.mmap]:
    """A file of this process alone, mapped and not touched."""
    with (tmp_path / "mapped").open("w+b") as file:
        file.truncate(NUM_BYTES)
        mapping = mmap.mmap(file.fileno(), NUM_BYTES)
        yield mapping
        mapping.close()


def resident_bytes(tmp_path: Path) -> int:
    """How much of the file this process' page tables know."""
    lines = iter(Path("/proc/self/smaps").read_text("utf-8").splitlines())
    assert any(line.endswith(str(tmp_path / "mapped")) for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


@pytest.mark.parametrize("write", [True, False])
def test_page_tables_are_full_afterwards(
    mapping: mmap.mmap, tmp_path: Path, *, write: bool
) -> None:
    mapping[:4] = b"kept"
    assert resident_bytes(tmp_path) < NUM_BYTES
    prefault = Prefault(memoryview(mapping), write=write)
    assert prefault.wait(float("inf"))
    assert resident_bytes(tmp_path) == NUM_BYTES
    prefault.stop()
    prefault.stop()
    assert mapping[:5] == b"kept\0"


def test_stopping_lets_go_of_the_mapping_even_if_it_is_not_done(mapping: mmap.mmap) -> None:
    prefault = Prefault(memoryview(mapping), write=True)
    prefault.stop()
    # Refused while anything looks at it.
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping[0]
