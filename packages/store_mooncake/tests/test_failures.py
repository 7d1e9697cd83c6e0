"""Masters and owners that stop, die, are full, or hold what is no page: misses, and never wrong bytes.

Whatever hangs here, fails by the time-out of every test.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pytest

from radixlink_contracts import PageBits, PoolName
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store_mooncake._object import PageFormat
from radixlink_testing import SUITE_LAYOUT, read_right
from radixlink_testing.pages import page_keys, page_parts

from .conftest import Vandal, stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PageKeys
    from radixlink_store_mooncake import MooncakePageStore

    from .conftest import Connect, Mooncake, StartMooncake

_KEYS: Final = page_keys(range(16))
_PROGRAM: Final = Path(__file__).parent / "programs" / "opener.py"
_SOON_S: Final = 30.0
_SHORT_S: Final = 1.0
_WIDE: Final = attrs.evolve(SUITE_LAYOUT, range_bytes=(1 << 20,))


def put_all(store: MooncakePageStore, keys: PageKeys = _KEYS) -> None:
    assert store.put(keys, page_parts(keys, store.layout)).complete, store.counters


def soon(condition: Callable[[], bool]) -> bool:
    """It is so within half a minute."""
    deadline = time.monotonic() + _SOON_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("whole_pages", [True, False])
def test_killed_owner_costs_misses(
    start_mooncake: StartMooncake, connect_to: Connect, *, whole_pages: bool
) -> None:
    mooncake = start_mooncake("--client_ttl=2")
    victim, _ = mooncake.start_owner(), mooncake.start_owner()
    factory = connect_to(mooncake, whole_pages=whole_pages, call_timeout_s=2.0)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    before = store.open(_KEYS, 0.0)
    victim.kill()
    victim.wait()
    # What was fetched whole can be read. Of what lay there no range can, and Mooncake may try for
    # longer than a call may take, so that the pages of the other owner are missed with it.
    assert read_right(store, before).complete == whole_pages
    handles = store.open(_KEYS, 0.0)
    assert not handles.found.complete
    assert read_right(store, handles) == handles.found
    # New pages may be sent to the dead one; those that were stored can be read.
    others = page_keys(range(16), "after")
    stored = store.put(others, page_parts(others, SUITE_LAYOUT))
    assert read_right(store, store.open(others, 0.0)) == stored
    assert soon(lambda: store.put(_KEYS, page_parts(_KEYS, SUITE_LAYOUT)).complete)
    assert soon(lambda: read_right(store, store.open(_KEYS, 0.0)).complete)


def test_second_replica_survives_its_owner(
    start_mooncake: StartMooncake, connect_to: Connect
) -> None:
    mooncake = start_mooncake("--client_ttl=2")
    victim, _ = mooncake.start_owner(), mooncake.start_owner()
    factory = connect_to(mooncake, replica_num=2)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    victim.kill()
    victim.wait()
    assert soon(lambda: read_right(store, store.open(_KEYS, 0.0)).complete)


@pytest.mark.parametrize("whole_pages", [True, False])
def test_stopped_master_is_misses_until_it_goes_on(
    start_mooncake: StartMooncake, connect_to: Connect, *, whole_pages: bool
) -> None:
    mooncake = start_mooncake()
    mooncake.start_owner()
    factory = connect_to(mooncake, call_timeout_s=_SHORT_S, whole_pages=whole_pages)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    before = store.open(_KEYS, 0.0)
    with stopped(mooncake.master):
        assert store.contains(_KEYS) == PageBits.none(16)
        assert store.open(_KEYS, 0.0).found == PageBits.none(16)
        assert read_right(store, before).complete == whole_pages
        others = page_keys(range(4), "others")
        assert store.put(others, page_parts(others, SUITE_LAYOUT)) == PageBits.none(4)
        with pytest.raises(BackendUnavailableError, match="to answer"):
            factory.open(attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA))
        # Now as many are late as may be: these are not made.
        for _ in range(100):
            assert store.contains(_KEYS) == PageBits.none(16)
        assert store.counters.unanswered >= 103
    assert soon(lambda: store.contains(_KEYS).complete)
    assert read_right(store, store.open(_KEYS, 0.0)) == PageBits.all(16)


def test_stopped_owner_is_misses_until_it_goes_on(
    start_mooncake: StartMooncake, connect_to: Connect
) -> None:
    mooncake = start_mooncake("--client_ttl=60")
    owner = mooncake.start_owner()
    factory = connect_to(mooncake, call_timeout_s=_SHORT_S)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    with stopped(owner):
        assert store.open(_KEYS, 0.0).found == PageBits.none(16)
        others = page_keys(range(4), "others")
        assert store.put(others, page_parts(others, SUITE_LAYOUT)) == PageBits.none(4)
        assert store.counters.unanswered == 2
    assert soon(lambda: store.open(_KEYS, 0.0).found.complete)
    assert read_right(store, store.open(_KEYS, 0.0)) == PageBits.all(16)


def test_killed_master_is_misses(start_mooncake: StartMooncake, connect_to: Connect) -> None:
    mooncake = start_mooncake()
    mooncake.start_owner()
    factory = connect_to(mooncake, call_timeout_s=_SHORT_S)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    mooncake.master.kill()
    mooncake.master.wait()
    assert store.contains(_KEYS) == PageBits.none(16)
    assert store.open(_KEYS, 0.0).found == PageBits.none(16)
    others = page_keys(range(4), "others")
    assert store.put(others, page_parts(others, SUITE_LAYOUT)) == PageBits.none(4)
    with pytest.raises(BackendUnavailableError, match="to answer"):
        factory.open(SUITE_LAYOUT)


def test_full_store_takes_what_fits_and_says_so(
    start_mooncake: StartMooncake, connect_to: Connect
) -> None:
    mooncake = start_mooncake()
    mooncake.start_owner(16 << 20)
    factory = connect_to(mooncake, with_hard_pin=True)
    store = factory.open(_WIDE)
    keys = page_keys(range(24))
    stored = store.put(keys, page_parts(keys, _WIDE))
    assert 8 < stored.total < 16
    assert store.counters.rejected_full == 24 - stored.total
    for start in range(0, 24, 8):
        some = keys.span(start, start + 8)
        handles = store.open(some, 0.0)
        assert [start + page for page in read_right(store, handles)] == [
            page for page in stored if start <= page < start + 8
        ]


def test_no_owner_is_a_full_store(start_mooncake: StartMooncake, connect_to: Connect) -> None:
    factory = connect_to(start_mooncake())
    store = factory.open(SUITE_LAYOUT)
    assert store.put(_KEYS, page_parts(_KEYS, SUITE_LAYOUT)) == PageBits.none(16)
    assert store.counters.rejected_full == 16


@pytest.mark.parametrize("whole_pages", [True, False])
def test_object_that_is_no_page_is_a_miss_and_goes(
    mooncake: Mooncake, connect_to: Connect, *, whole_pages: bool
) -> None:
    namespace = f"alien{whole_pages}"
    size = PageFormat.of(SUITE_LAYOUT).object_bytes
    # Smaller than a header, without its last byte, of the right size, and larger.
    sizes = {2: 10, 3: size - 1, 5: size, 7: size + 1, 11: 2 * size}
    expected = PageBits.of(set(range(16)) - sizes.keys(), 16)
    vandal = Vandal(mooncake)
    factory = connect_to(mooncake, namespace=namespace, whole_pages=whole_pages)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    for page, alien_size in sizes.items():
        name = f"{namespace}/{SUITE_LAYOUT.fingerprint.hex()}/{_KEYS[page].hex()}"
        vandal.remove(name)
        vandal.put(name, alien_size)
    assert store.contains(_KEYS).complete
    handles = store.open(_KEYS, 0.0)
    assert handles.found == expected
    assert read_right(store, handles) == expected
    assert store.contains(_KEYS) == expected
    assert store.counters.corrupt == len(sizes)
    put_all(store)
    assert read_right(store, store.open(_KEYS, 0.0)).complete
    vandal.close()


def test_processes_share_pages_and_say_who_wrote_them(
    mooncake: Mooncake, connect_to: Connect
) -> None:
    factory = connect_to(mooncake)
    with _program(mooncake) as program:
        store = factory.open(SUITE_LAYOUT)
        pid = _line(program)
        handles = store.open(_KEYS.span(0, 2), 0.0)
        assert read_right(store, handles) == PageBits.all(2)
        assert list(handles.writers) == [int(pid)] * 2
        assert program.communicate("go on\n")[0] == "2\n"
        assert program.returncode == 0
        assert read_right(store, store.open(_KEYS.span(0, 2), 0.0)) == PageBits.all(2)


def test_process_ends_while_its_calls_hang(start_mooncake: StartMooncake) -> None:
    mooncake = start_mooncake()
    mooncake.start_owner()
    with _program(mooncake) as program:
        _line(program)
        with stopped(mooncake.master):
            out, err = program.communicate("go on\n")
        assert (program.returncode, out) == (0, "0\n"), err


@contextlib.contextmanager
def _program(mooncake: Mooncake) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(_PROGRAM), mooncake.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def _line(program: subprocess.Popen[str]) -> str:
    """The next line that is no log of Mooncake's."""
    assert program.stdout is not None
    return program.stdout.readline()


@pytest.fixture(scope="module")
def mooncake(start_mooncake: StartMooncake) -> Mooncake:
    """One for tests that do it no harm."""
    mooncake = start_mooncake()
    mooncake.start_owner()
    return mooncake
