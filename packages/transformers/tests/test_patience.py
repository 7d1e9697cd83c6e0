from __future__ import annotations

import math

import pytest

from radixlink_contracts.errors import ContractError
from radixlink_transformers import EngineSettings
from radixlink_transformers._patience import Patience


class HandClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.num_calls = 0

    def now(self) -> float:
        self.num_calls += 1
        return self.time


def test_a_rank_alone_waits_by_its_clock() -> None:
    clock = HandClock()
    patience = Patience(clock=clock, timeout_s=1.0, poll_interval_s=1e-6, num_ranks=1)
    assert all(patience.lasts() for _ in range(100))
    clock.time = 0.999
    assert patience.lasts()
    clock.time = 1.0
    assert not patience.lasts()


def test_several_ranks_wait_by_steps_and_ask_no_clock() -> None:
    clock = HandClock()
    patience = Patience(clock=clock, timeout_s=0.001, poll_interval_s=0.00025, num_ranks=2)
    clock.time = 1e9
    num_calls = clock.num_calls
    assert [patience.lasts() for _ in range(6)] == [True] * 4 + [False] * 2
    assert clock.num_calls == num_calls


def test_no_time_is_no_patience() -> None:
    for num_ranks in (1, 2):
        patience = Patience(
            clock=HandClock(), timeout_s=0.0, poll_interval_s=1e-6, num_ranks=num_ranks
        )
        assert not patience.lasts()


def test_settings_refuse_a_wait_without_pauses() -> None:
    with pytest.raises(ContractError, match="poll_interval_s above 0"):
        EngineSettings(poll_interval_s=0.0)
    with pytest.raises(ContractError, match="chunk_tokens"):
        EngineSettings(chunk_tokens=0)


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300, -1.0])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ContractError, match=r"wait_timeout_s in 0\.\.1e"):
        EngineSettings(wait_timeout_s=seconds)
    with pytest.raises(ContractError, match="poll_interval_s above 0"):
        EngineSettings(poll_interval_s=seconds)
