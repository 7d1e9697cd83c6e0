"""Ports that a program can still have some seconds after they were drawn."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from radixlink_testing import ports
from radixlink_testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def of_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that says which ports connections get; it is not there yet."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_OF_CONNECTIONS", file)
    ports._ports.cache_clear()
    yield file
    ports._ports.cache_clear()


def test_no_connection_can_have_got_it(of_connections: Path) -> None:
    of_connections.write_text("9000\t60999\n")
    assert all(1 << 13 <= free_port() < 9000 for _ in range(50))


def test_no_port_comes_twice(of_connections: Path) -> None:
    of_connections.write_text("9000\t60999\n")
    drawn = [free_port() for _ in range(200)]
    assert len(set(drawn)) == len(drawn)


def test_a_taken_port_is_passed_over(of_connections: Path) -> None:
    of_connections.write_text(f"{(1 << 13) + 2}\t60999\n")
    with socket.socket() as holder:
        # Somebody else may have it, which is as good.
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", 1 << 13))
        assert 1 << 13 not in {free_port(), free_port()}


@pytest.mark.parametrize("said", ["1024\t60999\n", None])
def test_without_room_below_connections_it_is_one_of_theirs(
    of_connections: Path, said: str | None
) -> None:
    if said is not None:
        of_connections.write_text(said)
    with socket.socket() as program:
        program.bind(("127.0.0.1", free_port()))


def test_none_is_an_error_that_says_so(
    of_connections: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_connections.write_text("9000\t60999\n")

    class Refusing(socket.socket):
        @override
        def bind(self, address: object, /) -> None:
            raise OSError(f"{address} is taken")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(OSError, match=r"free port of 127\.0\.0\.1, got none in 100 tries"):
        free_port()
