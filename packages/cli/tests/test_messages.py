from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._messages import (
    Channel,
    Failed,
    Hello,
    Message,
    Note,
    Ready,
    Switchboard,
)
from radixlink.errors import ReplicaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from radixlink.demo._messages import Ended


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, Channel]]:
    """The command's end and the replica's."""
    # An address of a socket has 108 bytes.
    directory = tmp_path / ("long" * 50)
    directory.mkdir()
    switchboard = Switchboard(directory / "s")
    found: list[Channel] = []

    def connect() -> None:
        replica = Channel.connect(directory / "s", 5.0)
        replica.send(Hello(index=1, pid=42))
        found.append(replica)

    thread = threading.Thread(target=connect)
    thread.start()
    hello, command = switchboard.accept(5.0, lambda _: None)
    thread.join()
    assert hello == Hello(index=1, pid=42)
    yield command, found[0]
    command.close()
    found[0].close()
    switchboard.close()


def expect_ready(
    channel: Channel, *, timeout_s: float = 5.0, ended: Ended = lambda _: None
) -> list[str]:
    """Wait for `Ready`, and return the notes on the way."""
    notes: list[str] = []
    channel.expect(
        Ready, timeout_s=timeout_s, ended=ended, on_note=notes.append, waiting_for="a test"
    )
    return notes


def test_notes_on_the_way_are_passed_on(ends: tuple[Channel, Channel]) -> None:
    command, replica = ends
    said: tuple[Message, ...] = (Note(text="one"), Note(text="two"), Ready())
    for message in said:
        replica.send(message)
    assert expect_ready(command) == ["one", "two"]


def test_a_failure_is_raised_with_its_exit_code(ends: tuple[Channel, Channel]) -> None:
    command, replica = ends
    replica.send(Failed(message="the store is another model's", exit_code=7))
    with pytest.raises(ReplicaError, match="another model's") as raised:
        expect_ready(command)
    assert raised.value.exit_code == 7


def test_a_replica_that_hangs_up_is_an_error_that_says_why(ends: tuple[Channel, Channel]) -> None:
    command, replica = ends
    replica.close()
    with pytest.raises(ReplicaError, match=r"waiting for a test: .*exit code 3"):
        expect_ready(command, ended=lambda _: "it ended with exit code 3")


def test_the_exit_code_of_a_replica_that_hangs_up_is_waited_for(
    ends: tuple[Channel, Channel],
) -> None:
    """A process hangs up a moment before its exit code is known: who does not wait is told of none."""
    command, replica = ends
    replica.close()
    with pytest.raises(ReplicaError, match="exit code 3"):
        expect_ready(command, ended=lambda within_s: "exit code 3" if within_s > 1.0 else None)


def test_a_silent_replica_is_given_up_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ReplicaError, match=r"no word for 0.3 s"):
        expect_ready(ends[0], timeout_s=0.3)


def test_nobody_connecting_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    switchboard = Switchboard(tmp_path / "s")
    with pytest.raises(ReplicaError, match=r"no replica connected within 0.3 s"):
        switchboard.accept(0.3, lambda _: None)
    switchboard.close()
    assert not (tmp_path / "s").exists()


def test_a_replica_that_ends_before_it_connects_is_an_error(tmp_path: Path) -> None:
    switchboard = Switchboard(tmp_path / "s")
    with pytest.raises(ReplicaError, match="ended before it was ready: no such module"):
        switchboard.accept(30.0, lambda _: "no such module")
    switchboard.close()
