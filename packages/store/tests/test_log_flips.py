"""Every single bit of a record and of its file's head, flipped: a miss, a counter, written again."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest
from packages.store.tests.conftest import STRESS

from radixlink_store._log_file import LOG_SUFFIX, LogFormat
from radixlink_store.maintenance import LogStatus, LogVerdict, inspect, verify

if TYPE_CHECKING:
    from pathlib import Path

    from packages.store.tests.conftest import MakeLog

    from radixlink_contracts import PoolLayout

RECORDS = 20 if STRESS else 1


def flip(path: Path, place: int, bit: int) -> None:
    """Flip one bit of a file."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(place)
        (before,) = file.read(1)
        file.seek(place)
        file.write(bytes([before ^ 1 << bit]))


@pytest.mark.timeout(1800 if STRESS else 60)
@pytest.mark.parametrize("sealed", [True, False])
def test_every_bit_of_a_record(
    make_log: MakeLog, layout: PoolLayout, tmp_path: Path, *, sealed: bool
) -> None:
    """The other records of the file are read all the while."""
    format_ = LogFormat(layout)
    first = make_log()
    for page in range(RECORDS + 1):
        assert first.put(page)
    (path,) = (tmp_path / "files").glob(f"*{LOG_SUFFIX}")
    if sealed:
        first.close()
    pages = range(RECORDS + 1)
    flips = 0
    for page, place, bit in itertools.product(
        range(RECORDS), range(format_.record.head_bytes + layout.page_bytes), range(8)
    ):
        flip(path, format_.offset(page) + place, bit)
        if sealed:
            path.chmod(0o400)
        log = make_log()
        assert log.held(pages) == [each for each in pages if each != page], (place, bit)
        counted = log.tally.counters
        # A list of keys leads there, and so does a header; without either it is passed over.
        in_head = place < format_.record.head_bytes
        assert (counted.corrupt, counted.torn) == ((0, 1) if in_head and not sealed else (1, 0))
        assert log.put(page)
        assert log.held(pages) == list(pages)
        log.close()
        for another in set(path.parent.iterdir()) - {path}:
            another.unlink()
        flip(path, format_.offset(page) + place, bit)
        flips += 1
    sys.stdout.write(f"{flips:,} bits of {RECORDS} records flipped, none read\n")


def test_damaged_record_can_be_written_again(
    make_log: MakeLog, layout: PoolLayout, tmp_path: Path
) -> None:
    first = make_log()
    for page in range(3):
        assert first.put(page)
    first.close()
    (path,) = (tmp_path / "files").glob(f"*{LOG_SUFFIX}")
    flip(path, LogFormat(layout).offset(1) + LogFormat(layout).record.head_bytes, 3)
    log = make_log()
    assert log.held(range(3)) == [0, 2]
    assert log.put(1)
    assert log.held(range(3)) == [0, 1, 2]
    log.close()
    # Whichever of the two records is found first.
    again = make_log()
    assert again.held(range(3)) == [0, 1, 2]


def test_every_bit_of_a_head_leaves_the_file_alone_or_its_pages_right(
    make_log: MakeLog, layout: PoolLayout, tmp_path: Path
) -> None:
    first = make_log()
    assert first.put(0)
    first.close()
    (path,) = (tmp_path / "files").glob(f"*{LOG_SUFFIX}")
    for place, bit in itertools.product(range(LogFormat(layout).start), range(8)):
        flip(path, place, bit)
        log = make_log()
        assert log.held([0]) == []
        assert log.tally.counters.refused == 1
        log.close()
        flip(path, place, bit)


def test_every_bit_of_the_list_of_keys_is_seen_and_the_headers_are_read(
    make_log: MakeLog, layout: PoolLayout, tmp_path: Path
) -> None:
    first = make_log()
    for page in range(3):
        assert first.put(page)
    first.close()
    files = tmp_path / "files"
    (path,) = files.glob(f"*{LOG_SUFFIX}")
    for place, bit in itertools.product(
        range(LogFormat(layout).offset(3), path.stat().st_size), range(8)
    ):
        flip(path, place, bit)
        path.chmod(0o400)
        log = make_log()
        assert log.held(range(3)) == [0, 1, 2]
        (found,) = verify(files)
        assert isinstance(found, LogVerdict)
        assert "list of keys" in {damage.what for damage in found.damages}
        flip(path, place, bit)
        path.chmod(0o400)
        log.close()
    (verdict,) = verify(files)
    assert isinstance(verdict, LogVerdict)
    assert (verdict.num_records, verdict.damages) == (3, ())
    (status,) = inspect(files)
    assert isinstance(status, LogStatus)
    assert (status.num_records, status.num_torn, status.num_unsealed) == (3, 0, 0)
