from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts.errors import StaleHandleError
from radixlink_store.segments import SlotLocks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[SlotLocks]:
    """Locks in a file that has no name any more."""
    file = tmp_path / "locks"
    locks = SlotLocks(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    file.unlink()
    yield locks
    locks.close()


def test_lock_is_refused_to_all_others_until_it_is_released(locks: SlotLocks) -> None:
    with locks.lend() as one, locks.lend() as two:
        assert one.try_lock(5)
        assert not two.try_lock(5)
        assert two.try_lock(6)
        one.unlock(5)
        assert two.try_lock(5)
        two.unlock(5)
        two.unlock(6)


def test_descriptors_are_lent_again(locks: SlotLocks) -> None:
    with locks.lend() as first:
        pass
    with locks.lend() as second, locks.lend() as third:
        assert second is first
        assert third is not first


def test_lock_ends_with_the_last_descriptor_of_its_description(tmp_path: Path) -> None:
    file = tmp_path / "locks"
    mine = SlotLocks(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    theirs = SlotLocks(os.open(file, os.O_RDWR))
    with theirs.lend() as other:
        with mine.lend() as lock:
            assert lock.try_lock(0)
            mine.close()
            assert not other.try_lock(0)
        assert other.try_lock(0)
    theirs.close()


def test_closing_leaves_no_descriptor(tmp_path: Path) -> None:
    before = _open_files()
    locks = SlotLocks(os.open(tmp_path / "locks", os.O_RDWR | os.O_CREAT, 0o600))
    with locks.lend(), locks.lend():
        assert _open_files() == before + 3
    locks.close()
    locks.close()
    assert _open_files() == before
    with pytest.raises(StaleHandleError, match="closed"), locks.lend():
        pass


def test_forked_child_must_not_lock(locks: SlotLocks) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with locks.lend():
                pass
        except StaleHandleError:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
