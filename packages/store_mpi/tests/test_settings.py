"""What the environment says about nodes."""

from __future__ import annotations

import pytest

from radixlink_contracts.errors import ContractError
from radixlink_store_mpi import NodeSettings
from radixlink_store_mpi._ranks import part_of
from radixlink_store_mpi._settings import ANSWER_TIMEOUT, FAKE_NODES


def test_environment_is_read() -> None:
    assert NodeSettings.from_environment({}) == NodeSettings()
    environ = {FAKE_NODES: "2", ANSWER_TIMEOUT: "0.5"}
    settings = NodeSettings.from_environment(environ)
    assert settings == NodeSettings(fake_nodes=2, answer_timeout_s=0.5)


@pytest.mark.parametrize("environ", [{FAKE_NODES: "two"}, {ANSWER_TIMEOUT: ""}])
def test_variable_that_is_no_number_is_refused(environ: dict[str, str]) -> None:
    (name,) = environ
    with pytest.raises(ContractError, match=name):
        NodeSettings.from_environment(environ)


@pytest.mark.parametrize(
    "environ",
    [{FAKE_NODES: "0"}, {ANSWER_TIMEOUT: "0"}, {ANSWER_TIMEOUT: "nan"}, {ANSWER_TIMEOUT: "inf"}],
)
def test_number_that_means_nothing_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ContractError, match="NodeSettings"):
        NodeSettings.from_environment(environ)


def test_ranks_of_a_machine_are_split_evenly_into_neighbours() -> None:
    assert [part_of(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [part_of(rank, 5, 2) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert [part_of(rank, 4, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert len({part_of(rank, 4, 9) for rank in range(4)}) == 4
