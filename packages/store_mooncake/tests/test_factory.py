"""What is refused when a store is made or opened, and how it is told."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import attrs
import pytest

from radixlink_contracts import StoreConfig
from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    ContractError,
)
from radixlink_store_mooncake import MooncakeSettings, MooncakeStoreFactory, _factory, _process
from radixlink_testing import SUITE_LAYOUT
from radixlink_testing.pages import page_keys, page_parts
from radixlink_testing.ports import free_port

from .conftest import BUFFER_BYTES
from .forked import told_in_child

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Mooncake, Namespace

KEYS: Final = page_keys(range(4))


@pytest.fixture
def factory(whole: Namespace) -> MooncakeStoreFactory:
    """The one of all tests that do it no harm."""
    return whole.factory


def test_no_master_is_told_at_once_with_its_address(mooncake: Mooncake) -> None:
    del mooncake  # Mooncake itself is installed.
    address = f"127.0.0.1:{free_port()}"
    factory = MooncakeStoreFactory(StoreConfig(location=address))
    with pytest.raises(BackendUnavailableError, match=f"{address}.*refused.*start one") as caught:
        factory.open(SUITE_LAYOUT)
    assert caught.value.transient


def test_host_that_is_not_there_is_told(mooncake: Mooncake) -> None:
    del mooncake
    factory = MooncakeStoreFactory(StoreConfig(location="no-such-host.invalid:50051"))
    with pytest.raises(BackendUnavailableError, match=r"no-such-host\.invalid:50051"):
        factory.open(SUITE_LAYOUT)


def test_listener_that_is_no_master_is_told(mooncake: Mooncake) -> None:
    del mooncake
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        factory = MooncakeStoreFactory(StoreConfig(location=address, timeout_s=1.0))
        with pytest.raises(BackendUnavailableError, match=r"did not answer as one within 1 s"):
            factory.open(SUITE_LAYOUT)


@pytest.mark.parametrize(
    "location", ["", "host", "host:", ":50051", "host:port", "host:0", "host:65536", "a/directory"]
)
def test_location_that_is_no_address_is_refused(location: str) -> None:
    with pytest.raises(BackendUnavailableError, match="HOST:PORT"):
        MooncakeStoreFactory(StoreConfig(location=location))


def test_file_with_settings_is_a_location(
    mooncake: Mooncake, factory: MooncakeStoreFactory, tmp_path: Path
) -> None:
    file = tmp_path / "mooncake.json"
    fields = {"master_server_address": mooncake.address, "namespace": "from-a-file"}
    file.write_text(json.dumps(fields))
    other = MooncakeStoreFactory(StoreConfig(location=str(file)))
    assert other.open(SUITE_LAYOUT).put(KEYS, page_parts(KEYS, SUITE_LAYOUT)).complete
    other.close()
    # Another namespace holds other pages.
    assert not factory.open(SUITE_LAYOUT).contains(KEYS).mask


def test_unknown_fields_are_named_with_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    fields = {"master_server_address": "127.0.0.1:50051", "replicas": 2, "lease": 1}
    file.write_text(json.dumps(fields))
    with pytest.raises(
        BackendUnavailableError, match=r"only the fields .*replica_num.*, got also lease, replicas$"
    ):
        MooncakeStoreFactory(StoreConfig(location=str(file)))


@pytest.mark.parametrize("text", ["", "[1]", "{", "{}", '{"namespace": "x"}'])
def test_file_without_settings_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(text)
    with pytest.raises(BackendUnavailableError, match=r"mooncake\.json"):
        MooncakeStoreFactory(StoreConfig(location=str(file)))


def test_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="No such file"):
        MooncakeStoreFactory(StoreConfig(location=str(tmp_path / "mooncake.json")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica_num", 0),
        ("replica_num", "2"),
        ("replica_num", True),
        ("with_hard_pin", 1),
        ("global_segment_size", 1),
        ("global_segment_size", -1),
        ("local_buffer_size", -1),
        ("namespace", ""),
        ("protocol", ""),
        ("buffer_bytes", 100),
        ("num_buffers", 1),
        ("call_timeout_s", 0),
        ("call_timeout_s", float("inf")),
        ("call_timeout_s", 1e12),
        ("call_timeout_s", float("nan")),
        ("max_late_calls", 0),
    ],
)
def test_value_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    fields = {"master_server_address": "127.0.0.1:50051", field: value}
    with pytest.raises(BackendUnavailableError, match=field):
        MooncakeSettings.from_fields(fields, where="a test")


def test_location_and_settings_at_once_are_refused() -> None:
    settings = MooncakeSettings(master_server_address="127.0.0.1:50051")
    with pytest.raises(BackendUnavailableError, match="both"):
        MooncakeStoreFactory(StoreConfig(location="127.0.0.1:50051"), settings)


def test_persistent_tier_of_files_is_refused() -> None:
    config = StoreConfig(location="127.0.0.1:50051", persistent_path="/x", persistent_bytes=1 << 20)
    with pytest.raises(BackendUnavailableError, match="persistent tier"):
        MooncakeStoreFactory(config)


def test_missing_mooncake_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    factory = MooncakeStoreFactory(StoreConfig(location="127.0.0.1:50051"))
    with pytest.raises(BackendUnavailableError, match=r"pip install .*libibverbs1"):
        factory.open(SUITE_LAYOUT)


class _Client:
    """One that is asked to register memory and has not answered yet. Mooncake's own answers at once."""

    def __init__(self) -> None:
        self.answer, self.closed = threading.Event(), threading.Event()

    def register_buffer(self, _address: int, _size: int) -> int:
        self.answer.wait()
        return 0

    def unregister_buffer(self, _address: int) -> int:
        return 0

    def close(self) -> int:
        self.closed.set()
        return 0


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> _Client:
    """The one of every factory of a test, in place of Mooncake's."""
    client = _Client()
    monkeypatch.setattr(_factory, "make_client", lambda: client)
    monkeypatch.setattr(_factory, "make_replicate_config", lambda _settings: None)
    monkeypatch.setattr(_factory, "connect", lambda *_arguments: None)
    return client


def test_connection_whose_memory_is_not_registered_in_time_is_closed(client: _Client) -> None:
    settings = MooncakeSettings(master_server_address="127.0.0.1:50051", call_timeout_s=0.01)
    factory = MooncakeStoreFactory(StoreConfig(timeout_s=0.01), settings)
    with pytest.raises(BackendUnavailableError, match=r"within 0\.01 s"):
        factory.open(SUITE_LAYOUT)
    assert not client.closed.is_set()
    client.answer.set()
    assert client.closed.wait(30.0)


def test_connection_of_a_process_without_further_threads_is_told_and_closed(
    client: _Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    factory = MooncakeStoreFactory(StoreConfig(location="127.0.0.1:50051"))
    with pytest.raises(BackendUnavailableError, match="can't start new thread"):
        factory.open(SUITE_LAYOUT)
    assert client.closed.is_set()


@pytest.fixture
def _as_if_never_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have connected this process, which is reason enough to refuse its children."""
    monkeypatch.setattr(_process, "_CONNECTED", set[tuple[int, int]]())


@pytest.mark.usefixtures("_as_if_never_connected")
def test_child_forked_while_another_thread_loads_mooncake_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load_slowly() -> _Client:
        loading.set()
        go_on.wait()
        raise BackendUnavailableError("no Mooncake")

    monkeypatch.setattr(_factory, "make_client", load_slowly)
    factory = MooncakeStoreFactory(StoreConfig(location="127.0.0.1:50051"))
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(factory.open, SUITE_LAYOUT)
        loading.wait()
        told = told_in_child(lambda: factory.open(SUITE_LAYOUT), factory.close)
        go_on.set()
        with pytest.raises(BackendUnavailableError, match="no Mooncake"):
            opened.result()
    opening, closing = told
    assert f"one of {os.getpid()} in its forked child" in opening
    assert closing == "nothing"
    factory.close()


@pytest.mark.usefixtures("_as_if_never_connected")
def test_child_forked_while_another_thread_connects_is_told_whichever_factory_it_asks(
    mooncake: Mooncake,
) -> None:
    del mooncake
    with socket.create_server(("127.0.0.1", 0)) as master, ThreadPoolExecutor(1) as threads:
        config = StoreConfig(location=f"127.0.0.1:{master.getsockname()[1]}", timeout_s=5.0)
        factory, other = MooncakeStoreFactory(config), MooncakeStoreFactory(config)
        opened = threads.submit(factory.open, SUITE_LAYOUT)
        # It is looked whether anybody listens; what follows waits for an answer.
        master.accept()[0].close()
        opening, closing, opening_other = told_in_child(
            lambda: factory.open(SUITE_LAYOUT), factory.close, lambda: other.open(SUITE_LAYOUT)
        )
        with pytest.raises(BackendUnavailableError, match="did not answer as one"):
            opened.result()
    for told in (opening, opening_other):
        assert f"forked from {os.getpid()} after that" in told
    assert closing == "nothing"


@pytest.mark.usefixtures("_as_if_never_connected")
def test_factory_that_only_a_child_uses_is_the_child_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    factory = MooncakeStoreFactory(StoreConfig(location="127.0.0.1:50051"))

    def open_in_child() -> None:
        with pytest.raises(BackendUnavailableError, match="pip install"):
            factory.open(SUITE_LAYOUT)

    assert told_in_child(open_in_child, factory.close) == ["nothing", "nothing"]


def test_page_that_fits_no_buffer_is_refused(factory: MooncakeStoreFactory) -> None:
    with pytest.raises(CapacityError, match="buffer_bytes") as caught:
        factory.open(attrs.evolve(SUITE_LAYOUT, range_bytes=(BUFFER_BYTES,)))
    needed, available = caught.value.needed, caught.value.available
    assert (needed, available) == (64 + 64 + BUFFER_BYTES, BUFFER_BYTES)
    # One that fits does, and others are not hindered.
    assert factory.open(SUITE_LAYOUT).put(KEYS, page_parts(KEYS, SUITE_LAYOUT)).complete


def test_pages_of_more_than_one_buffer_are_put_and_read(factory: MooncakeStoreFactory) -> None:
    layout = attrs.evolve(SUITE_LAYOUT, range_bytes=(1000, 600))
    store = factory.open(layout)
    keys = page_keys(range(90))
    parts = page_parts(keys, layout)
    assert BUFFER_BYTES < len(parts[0]) < 2 * BUFFER_BYTES
    assert store.put(keys, parts).complete
    handles = store.open(keys, 0.0)
    assert handles.found.complete
    for layer_range, part in enumerate(parts):
        out = bytearray(len(part))
        assert store.read(handles, layer_range, out).complete
        assert out == part


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan")])
def test_ttl_that_is_no_time_is_refused(factory: MooncakeStoreFactory, ttl_s: float) -> None:
    with pytest.raises(ContractError, match="ttl_s"):
        factory.open(SUITE_LAYOUT).open(KEYS, ttl_s)
