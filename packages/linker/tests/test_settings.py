from __future__ import annotations

import threading

import attrs
import pytest

from radixlink_contracts import PoolName
from radixlink_contracts.errors import ContractError
from radixlink_linker import LinkerSettings, StoreLinkerSettings, ThreadExecutor


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_operations", 0),
        ("retry_after_uses", 0),
        ("max_operations", 65),
        ("max_lookups", 0),
        ("max_lookups", 4097),
        ("frame_words", 9),
        ("frame_words", -1),
        ("staged_percent", 0),
        ("staged_percent", 101),
        ("max_loads", 0),
        ("publish_lock_steps", -1),
        ("miss_steps", -1),
        ("heartbeat_steps", 0),
        ("write_off_steps", 0),
        ("written_off_percent", -1),
        ("written_off_percent", 101),
        ("backup_threshold", 0),
        ("step_timeout_s", 0.0),
        ("step_timeout_s", float("nan")),
        ("lookup_timeout_s", -1.0),
        ("transfer_timeout_s", float("inf")),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ContractError, match=f"{name}.*got {value}"):
        LinkerSettings(**{name: value})  # type: ignore[arg-type]


def test_a_frame_has_room_for_its_lookups_and_one_word_of_a_mask() -> None:
    LinkerSettings(frame_words=10, max_lookups=256)
    LinkerSettings(frame_words=7, max_lookups=64)
    with pytest.raises(ContractError, match="at least 70 for 4096 lookups, got 69"):
        LinkerSettings(frame_words=69, max_lookups=4096)


def test_pools_that_no_component_names_are_not_shared() -> None:
    LinkerSettings(shared_pools=())
    LinkerSettings(shared_pools=(PoolName.MAMBA, PoolName.KV))
    with pytest.raises(ContractError, match=r"shared_pools among .*'mamba'.*, got .*INDEXER"):
        LinkerSettings(shared_pools=(PoolName.KV, PoolName.INDEXER))


def test_what_another_rank_stores_is_its_pools_of_the_ranks_that_it_stores_for() -> None:
    settings = LinkerSettings(storing_ranks=(0, 0, 2), shared_pools=(PoolName.MAMBA,))
    assert [settings.stored_elsewhere(rank, 3) for rank in range(3)] == [
        frozenset(),
        {PoolName.MAMBA},
        frozenset(),
    ]
    assert LinkerSettings().stored_elsewhere(1, 3) == frozenset()


def test_settings_that_differ_have_another_fingerprint() -> None:
    assert LinkerSettings().fingerprint == LinkerSettings().fingerprint
    assert LinkerSettings(miss_steps=65).fingerprint != LinkerSettings().fingerprint


def test_pools_that_are_named_in_another_order_are_the_same_settings() -> None:
    given = LinkerSettings(shared_pools=(PoolName.MAMBA, PoolName.KV, PoolName.MAMBA))
    other = LinkerSettings(shared_pools=(PoolName.KV, PoolName.MAMBA))
    assert given == other
    assert given.fingerprint == other.fingerprint
    assert other.fingerprint != LinkerSettings(shared_pools=(PoolName.KV,)).fingerprint


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(StoreLinkerSettings)])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_store_linker_needs_numbers_above_zero(name: str, value: float) -> None:
    with pytest.raises(ContractError, match=f"{name} above 0, got {value}"):
        StoreLinkerSettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [field.name for field in attrs.fields(StoreLinkerSettings) if field.name.endswith("_s")],
)
@pytest.mark.parametrize("value", [float("inf"), 1e10])
def test_a_time_that_no_wait_of_a_thread_takes_is_refused(name: str, value: float) -> None:
    with pytest.raises(OverflowError):
        threading.Event().wait(value)
    with pytest.raises(ContractError, match=rf"{name} of at most 1e\+06 s, got"):
        StoreLinkerSettings(**{name: value})  # type: ignore[arg-type]
    StoreLinkerSettings(**{name: 1e6})  # type: ignore[arg-type]


def test_the_longest_time_is_one_that_a_wait_of_a_thread_takes() -> None:
    done = threading.Event()
    done.set()
    assert done.wait(1e6)
    closed = ThreadExecutor(close_timeout_s=1e6)
    closed.close()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e10])
def test_an_executor_closes_in_a_time_that_a_thread_can_be_waited_for(value: float) -> None:
    with pytest.raises(ContractError, match=r"close_timeout_s in 0\.\.1e"):
        ThreadExecutor(close_timeout_s=value)


@pytest.mark.parametrize("value", [0, -1])
def test_an_executor_has_threads(value: int) -> None:
    with pytest.raises(ContractError, match=f"num_threads of at least 1, got {value}"):
        ThreadExecutor(num_threads=value)
