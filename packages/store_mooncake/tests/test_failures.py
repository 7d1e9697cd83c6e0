"""Masters and owners that stop, die, are full, or hold what is no page: misses, and never wrong bytes.

Whatever hangs here, fails by the time-out of every test.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pytest

from radixlink_contracts import PageBits, PoolName
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store_mooncake import SMALLEST_SEGMENT_BYTES
from radixlink_store_mooncake._object import PageFormat
from radixlink_testing import SUITE_LAYOUT, read_page_range, read_right
from radixlink_testing.pages import page_keys, page_parts

from .conftest import stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PageKeys
    from radixlink_store_mooncake import MooncakePageStore, MooncakeStoreFactory

    from .conftest import Connect, Mooncake, Namespace, StartMooncake

_KEYS: Final = page_keys(range(16))
_PAGES_OF_PROGRAM: Final = page_keys(range(2), "opener")
_PROGRAMS: Final = Path(__file__).parent / "programs"
_SOON_S: Final = 30.0
_SHORT_S: Final = 1.0
_WIDE: Final = attrs.evolve(SUITE_LAYOUT, range_bytes=(1 << 20,))


def put_all(store: MooncakePageStore, keys: PageKeys = _KEYS) -> None:
    assert store.put(keys, page_parts(keys, store.layout)).complete, store.counters


def _is_stored_again(store: MooncakePageStore) -> bool:
    return store.put(_KEYS, page_parts(_KEYS, SUITE_LAYOUT)).complete


def _is_read(store: MooncakePageStore) -> bool:
    return read_right(store, store.open(_KEYS, 0.0)).complete


def soon(condition: Callable[[], bool]) -> bool:
    """It is so within half a minute."""
    deadline = time.monotonic() + _SOON_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_killed_owner_costs_misses_unless_another_has_the_pages(
    start_mooncake: StartMooncake, connect_to: Connect
) -> None:
    mooncake = start_mooncake("--client_ttl=2")
    victim, _ = mooncake.start_owner(), mooncake.start_owner()
    stores = {
        name: connect_to(
            mooncake,
            namespace=name,
            whole_pages=name != "ranges",
            replica_num=2 if name == "twice" else 1,
            call_timeout_s=2.0,
        ).open(SUITE_LAYOUT)
        for name in ("whole", "ranges", "twice")
    }
    before = {}
    for name, store in stores.items():
        put_all(store)
        before[name] = store.open(_KEYS, 0.0)
    victim.kill()
    victim.wait()
    # What was fetched whole can be read. Of what lay there no range can, and Mooncake may try for
    # longer than a call may take, so that the pages of the other owner are missed with it.
    assert read_right(stores["whole"], before["whole"]).complete
    assert not read_right(stores["ranges"], before["ranges"]).complete
    handles = stores["whole"].open(_KEYS, 0.0)
    assert not handles.found.complete
    assert read_right(stores["whole"], handles) == handles.found
    # New pages may be sent to the dead one; those that were stored can be read.
    others = page_keys(range(16), "after")
    stored = stores["whole"].put(others, page_parts(others, SUITE_LAYOUT))
    assert read_right(stores["whole"], stores["whole"].open(others, 0.0)) == stored
    twice = stores["twice"]
    assert soon(lambda: read_right(twice, twice.open(_KEYS, 0.0)).complete)
    for name in ("whole", "ranges"):
        store = stores[name]
        assert soon(functools.partial(_is_stored_again, store))
        assert soon(functools.partial(_is_read, store))


def test_stopped_master_is_misses_until_it_goes_on(
    short: MooncakeStoreFactory, short_ranges: MooncakeStoreFactory, patient: Patient
) -> None:
    store, ranges = short.open(SUITE_LAYOUT), short_ranges.open(SUITE_LAYOUT)
    put_all(store)
    put_all(ranges)
    before, before_ranges = store.open(_KEYS, 0.0), ranges.open(_KEYS, 0.0)
    others = page_keys(range(4), "others")
    unanswered = store.counters.unanswered
    # All at once: each takes as long as a call may.
    with stopped(patient.mooncake.master), ThreadPoolExecutor() as threads:
        contains = threads.submit(store.contains, _KEYS)
        opened = threads.submit(store.open, _KEYS, 0.0)
        put = threads.submit(store.put, others, page_parts(others, SUITE_LAYOUT))
        factory = threads.submit(short.open, attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA))
        read = threads.submit(read_page_range, ranges, before_ranges, 0)
        assert contains.result() == PageBits.none(16)
        assert opened.result().found == PageBits.none(16)
        assert put.result() == PageBits.none(4)
        with pytest.raises(BackendUnavailableError, match="to answer"):
            factory.result()
        assert read.result()[0] == PageBits.none(16)
        assert read_right(store, before) == PageBits.all(16)
        # Now as many are late as may be: these are not made.
        for _ in range(100):
            assert store.contains(_KEYS) == PageBits.none(16)
        assert store.counters.unanswered - unanswered >= 103
    for each in (store, ranges):
        assert soon(functools.partial(_is_read, each))


def test_stopped_owner_is_misses_until_it_goes_on(
    short: MooncakeStoreFactory, patient: Patient
) -> None:
    store = short.open(SUITE_LAYOUT)
    put_all(store)
    others = page_keys(range(4), "sent to the stopped one")
    with stopped(patient.owner), ThreadPoolExecutor() as threads:
        opened = threads.submit(store.open, _KEYS, 0.0)
        put = threads.submit(store.put, others, page_parts(others, SUITE_LAYOUT))
        assert opened.result().found == PageBits.none(16)
        assert put.result() == PageBits.none(4)
        assert store.counters.unanswered == 2
    assert soon(functools.partial(_is_read, store))


def test_killed_master_is_misses(start_mooncake: StartMooncake, connect_to: Connect) -> None:
    mooncake = start_mooncake()
    mooncake.start_owner()
    factory = connect_to(mooncake, call_timeout_s=_SHORT_S)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    mooncake.master.kill()
    mooncake.master.wait()
    others = page_keys(range(4), "others")
    with ThreadPoolExecutor() as threads:
        contains = threads.submit(store.contains, _KEYS)
        opened = threads.submit(store.open, _KEYS, 0.0)
        put = threads.submit(store.put, others, page_parts(others, SUITE_LAYOUT))
        again = threads.submit(factory.open, SUITE_LAYOUT)
        assert contains.result() == PageBits.none(16)
        assert opened.result().found == PageBits.none(16)
        assert put.result() == PageBits.none(4)
        with pytest.raises(BackendUnavailableError, match="to answer"):
            again.result()


def test_no_owner_is_a_full_store_until_a_process_gives_memory(
    start_mooncake: StartMooncake, connect_to: Connect
) -> None:
    mooncake = start_mooncake()
    store = connect_to(mooncake).open(SUITE_LAYOUT)
    assert store.put(_KEYS, page_parts(_KEYS, SUITE_LAYOUT)) == PageBits.none(16)
    assert store.counters.rejected_full == 16
    factory = connect_to(mooncake, global_segment_size=SMALLEST_SEGMENT_BYTES, with_hard_pin=True)
    wide = factory.open(_WIDE)
    keys = page_keys(range(24))
    stored = wide.put(keys, page_parts(keys, _WIDE))
    assert 8 < stored.total < 16
    assert wide.counters.rejected_full == 24 - stored.total
    for start in range(0, 24, 8):
        some = keys.span(start, start + 8)
        handles = wide.open(some, 0.0)
        assert [start + page for page in read_right(wide, handles)] == [
            page for page in stored if start <= page < start + 8
        ]


@pytest.mark.parametrize("way", ["whole", "ranges"])
def test_object_that_is_no_page_is_a_miss_and_goes(
    request: pytest.FixtureRequest, way: str
) -> None:
    namespace: Namespace = request.getfixturevalue(way)
    size = PageFormat.of(SUITE_LAYOUT).object_bytes
    # Smaller than a header, without its last byte, of the right size, and larger.
    sizes = {2: 10, 3: size - 1, 5: size, 7: size + 1, 11: 2 * size}
    expected = PageBits.of(set(range(16)) - sizes.keys(), 16)
    store = namespace.factory.open(SUITE_LAYOUT)
    put_all(store)
    for page, alien_size in sizes.items():
        name = namespace.name_of(SUITE_LAYOUT, _KEYS[page])
        namespace.vandal.remove(name)
        namespace.vandal.put(name, alien_size)
    assert store.contains(_KEYS).complete
    handles = store.open(_KEYS, 0.0)
    assert handles.found == expected
    assert read_right(store, handles) == expected
    assert store.contains(_KEYS) == expected
    assert store.counters.corrupt == len(sizes)
    put_all(store)
    assert read_right(store, store.open(_KEYS, 0.0)).complete


def test_handles_say_which_process_wrote_and_it_ends_while_its_calls_hang(
    short: MooncakeStoreFactory, patient: Patient
) -> None:
    with _program("opener.py", patient.mooncake) as program:
        pid = _line(program)
        store = short.open(SUITE_LAYOUT)
        handles = store.open(_PAGES_OF_PROGRAM, 0.0)
        assert read_right(store, handles) == PageBits.all(2)
        assert list(handles.writers) == [int(pid)] * 2
        with stopped(patient.mooncake.master):
            out, err = program.communicate("go on\n")
        assert (program.returncode, out) == (0, "0\n"), err


def test_forked_child_is_told_and_its_parent_is_not_disturbed(patient: Patient) -> None:
    stale, unavailable = "StaleHandleError", "BackendUnavailableError"
    told = [*[stale] * 5, *[unavailable] * 2, *["nothing"] * 2]
    with _program("forker.py", patient.mooncake) as program:
        out, err = program.communicate()
        assert (program.returncode, out) == (0, f"{' '.join(told)}\n0 2\n"), err


@contextlib.contextmanager
def _program(name: str, mooncake: Mooncake) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(_PROGRAMS / name), mooncake.address],
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


@attrs.frozen
class Patient:
    """A Mooncake for tests that stop a part of it and let it go on."""

    mooncake: Mooncake
    owner: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def patient(start_mooncake: StartMooncake) -> Patient:
    mooncake = start_mooncake("--client_ttl=60")
    return Patient(mooncake, mooncake.start_owner())


@pytest.fixture(scope="module")
def short(patient: Patient, connect_to: Connect) -> MooncakeStoreFactory:
    """Its calls may take a second."""
    return connect_to(patient.mooncake, call_timeout_s=_SHORT_S)


@pytest.fixture(scope="module")
def short_ranges(patient: Patient, connect_to: Connect) -> MooncakeStoreFactory:
    """The same, with pages that are read range by range."""
    return connect_to(
        patient.mooncake, namespace="ranges", whole_pages=False, call_timeout_s=_SHORT_S
    )
