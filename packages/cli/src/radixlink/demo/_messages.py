"""What the command and its replicas say to each other, over one local socket for each replica."""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import attrs

from radixlink.errors import ReplicaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_M = TypeVar("_M")
_POLL_S = 0.2

EXIT_CODE_TIMEOUT_S: Final = 2.0
"""A process that dies hangs up a moment before its exit code, and the last that it prints, are known."""

Ended: TypeAlias = "Callable[[float], str | None]"
"""Says why a replica has ended, or None while it runs; waits for its end for so many seconds, at most."""


@attrs.frozen(kw_only=True)
class Hello:
    """A replica is there.

    Attributes:
        index: Which one.
        pid: Its process.
    """

    index: int
    pid: int


@attrs.frozen(kw_only=True)
class ReplicaSpec:
    """What a replica is to be.

    Attributes:
        model_dir: A directory that `from_pretrained` loads.
        model_name: The model's name in the store's identity.
        model_digest: Its weights' digest, likewise.
        page_size: Tokens of a page.
        num_pages: Pages of its device pool.
        num_threads: Threads of its torch.
        store: Name of the store.
        store_dir: Location of the store; empty for its own choice.
        store_bytes: Capacity.
    """

    model_dir: str
    model_name: str
    model_digest: str
    page_size: int
    num_pages: int
    num_threads: int
    store: str
    store_dir: str
    store_bytes: int


@attrs.frozen(kw_only=True)
class Ready:
    """A replica has loaded its model and opened the store."""


@attrs.frozen(kw_only=True)
class Ask:
    """Answer a prompt, with and without the store, and check it.

    Attributes:
        request_id: Unique.
        prompt: All tokens so far.
        num_tokens: How many to generate.
    """

    request_id: str
    prompt: tuple[int, ...]
    num_tokens: int


@attrs.frozen(kw_only=True)
class Note:
    """What a replica is doing, for people."""

    text: str


@attrs.frozen(kw_only=True)
class TurnFigures:
    """One answered turn. Units: tokens, seconds.

    Attributes:
        prompt_tokens: Of the whole prompt.
        device_tokens: Found on the device.
        restored_tokens: Restored from the store.
        computed_tokens: Computed.
        first_token_s: Time to the first token, lookup and load included.
        load_s: The part of it until the pages were on the device.
        without_store_s: Time to the first token on the same replica with the same device content, store off.
        tokens: The answer.
        identical: It equals the answer of a run without a cache.
        dlogit: Largest difference of the logits at the first generated position from that run.
        control_dlogit: The same with one restored page swapped for another; None where nothing was restored.
        pages_by_writer: Restored pages by the process that had written them.
    """

    prompt_tokens: int
    device_tokens: int
    restored_tokens: int
    computed_tokens: int
    first_token_s: float
    load_s: float
    without_store_s: float
    tokens: tuple[int, ...]
    identical: bool
    dlogit: float
    control_dlogit: float | None
    pages_by_writer: Mapping[int, int]


@attrs.frozen(kw_only=True)
class Stop:
    """End."""


@attrs.frozen(kw_only=True)
class Stopped:
    """A replica was told to end, and has closed its engine and its store."""


@attrs.frozen(kw_only=True)
class Failed:
    """A replica cannot go on.

    Attributes:
        message: Why, for people.
        exit_code: What the command exits with.
    """

    message: str
    exit_code: int


Message: TypeAlias = (
    Hello | ReplicaSpec | Ready | Ask | Note | TurnFigures | Stop | Stopped | Failed
)
"""Everything that is said."""


class Channel:
    """One end of a replica's socket."""

    def __init__(self, connection: Connection) -> None:
        """Speak over a connection. Owns: the channel closes it."""
        self._connection = connection

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> Channel:
        """Connect to the command.

        Raises:
            OSError: Nobody listens there.
        """
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(timeout_s)
        with _short_name(path) as name:
            client.connect(name)
        client.settimeout(None)
        return cls(Connection(client.detach()))

    def send(self, message: Message) -> None:
        """Say something.

        Raises:
            OSError: The other end is gone.
        """
        self._connection.send(message)

    def receive(self) -> Message:
        """Wait for what the other end says.

        Raises:
            EOFError: The other end is gone.
        """
        message: Message = self._connection.recv()
        return message

    def expect(
        self,
        kind: type[_M],
        *,
        timeout_s: float,
        ended: Ended,
        on_note: Callable[[str], None],
        waiting_for: str,
    ) -> _M:
        """Wait for a message of one kind; notes on the way are passed on.

        Args:
            kind: The message's class.
            timeout_s: Seconds without any word after which the replica is given up.
            ended: Says why the replica has ended.
            on_note: Gets the text of each note.
            waiting_for: Named in errors.

        Raises:
            ReplicaError: It ended, is silent, or said that it failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._connection.poll(_POLL_S):
                    message = self.receive()
                    if isinstance(message, Note):
                        on_note(message.text)
                        deadline = time.monotonic() + timeout_s
                    elif isinstance(message, Failed):
                        raise _reported(message)
                    elif isinstance(message, kind):
                        return message
                    continue
            except (EOFError, OSError) as error:
                why = ended(EXIT_CODE_TIMEOUT_S) or "its connection broke"
                msg = f"waiting for {waiting_for}: the replica is gone: {why}"
                raise ReplicaError(msg) from error
            why_ended = ended(0.0)
            if why_ended is not None and not self._connection.poll(0):
                msg = f"waiting for {waiting_for}: the replica is gone: {why_ended}"
                raise ReplicaError(msg)
            if time.monotonic() > deadline:
                msg = f"waiting for {waiting_for}: no word for {timeout_s:g} s"
                raise ReplicaError(msg)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._connection.close()


def _reported(failure: Failed) -> ReplicaError:
    """The error that a replica reported, with its exit code."""
    error = ReplicaError(failure.message)
    error.exit_code = failure.exit_code
    return error


@contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A name for a socket file that fits into an address, which has 108 bytes, wherever its directory is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Switchboard:
    """Where replicas connect to."""

    def __init__(self, path: Path) -> None:
        """Listen on a new socket file in a directory that is this process's alone."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        with _short_name(path) as name:
            self._socket.bind(name)
        self._socket.listen()

    def accept(self, timeout_s: float, ended: Ended) -> tuple[Hello, Channel]:
        """Wait for one replica.

        Raises:
            ReplicaError: The processes ended, or nobody came in time.
        """
        accepted = self._next_connection(timeout_s, ended)
        channel = Channel(Connection(accepted.detach()))
        hello = channel.expect(
            Hello,
            timeout_s=timeout_s,
            ended=ended,
            on_note=lambda _: None,
            waiting_for="a replica's hello",
        )
        return hello, channel

    def _next_connection(self, timeout_s: float, ended: Ended) -> socket.socket:
        """Wait for a connection, as `accept` does."""
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(_POLL_S)
        while time.monotonic() < deadline:
            try:
                return self._socket.accept()[0]
            except TimeoutError:
                why_ended = ended(0.0)
                if why_ended is not None:
                    msg = f"a replica ended before it was ready: {why_ended}"
                    raise ReplicaError(msg) from None
        msg = f"no replica connected within {timeout_s:g} s"
        raise ReplicaError(msg)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
