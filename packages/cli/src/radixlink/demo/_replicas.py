"""The replicas as the command sees them: launched, asked, killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

import attrs

from radixlink.demo._messages import (
    EXIT_CODE_TIMEOUT_S,
    Ready,
    Stop,
    Stopped,
    Switchboard,
    TurnFigures,
)
from radixlink.demo._plan import REPLICAS
from radixlink.demo._processes import mpi_environment, mpirun, replica_environment
from radixlink.demo._terminal import print_result, say
from radixlink.errors import LaunchError, ReplicaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink.demo._messages import Ask, Channel, Ended, Message, ReplicaSpec
    from radixlink.demo._places import Places
    from radixlink.demo._processes import Processes

_START_TIMEOUT_S: Final = 120.0
_SILENCE_TIMEOUT_S: Final = 180.0
_END_TIMEOUT_S: Final = 20.0
_PROGRAM: Final = "radixlink.demo._replica"


@attrs.frozen(kw_only=True, eq=False)
class Replica:
    """One replica.

    Attributes:
        name: Its name.
        pid: Its process.
        channel: Its socket.
        place: Of the process that was started for it, among `processes`; under MPI that is `mpirun`.
        processes: All that were started.
    """

    name: str
    pid: int
    channel: Channel
    place: int
    processes: Processes

    def tell(self, message: Message) -> None:
        """Say something to it.

        Raises:
            ReplicaError: It is gone.
        """
        try:
            self.channel.send(message)
        except OSError as error:
            ended = self._ended(EXIT_CODE_TIMEOUT_S)
            raise ReplicaError(
                f"replica {self.name}, pid {self.pid}, is gone: {ended or 'its connection broke'}"
            ) from error

    def wait_until_ready(self) -> None:
        """Wait until it has loaded its model and opened the store.

        Raises:
            ReplicaError: It ended, is silent, or said that it failed.
        """
        self.channel.expect(
            Ready,
            timeout_s=_START_TIMEOUT_S,
            ended=self._ended,
            on_note=lambda text: say(f"replica {self.name}: {text}"),
            waiting_for=f"replica {self.name}",
        )

    def answer(self, ask: Ask, where: str) -> TurnFigures:
        """Ask it, and wait for the answer.

        Args:
            ask: The question.
            where: Which turn that is, for people.

        Raises:
            ReplicaError: It is gone, silent, or said that it failed.
        """
        self.tell(ask)
        return self.channel.expect(
            TurnFigures,
            timeout_s=_SILENCE_TIMEOUT_S,
            ended=self._ended,
            on_note=lambda text: say(f"{where}: {text}"),
            waiting_for=where,
        )

    def kill(self, *, alone: bool) -> None:
        """Kill it, as a crash would.

        Args:
            alone: Its process was started for it alone, so that its end can be waited for.
        """
        os.kill(self.pid, signal.SIGKILL)
        if alone:
            self.processes.wait(self.place, _END_TIMEOUT_S)
        self.channel.close()

    def stop(self, *, alone: bool) -> str | None:
        """Have it close its engine and its store and end by itself, but do not wait for long.

        Args:
            alone: Its process was started for it alone, so that its exit code is its own: `mpirun` fails because
                another of its ranks was killed.

        Returns:
            None when it ended well; else why not.
        """
        try:
            self.tell(Stop())
            self.channel.expect(
                Stopped,
                timeout_s=_END_TIMEOUT_S,
                ended=self._ended,
                on_note=lambda text: say(f"replica {self.name}: {text}"),
                waiting_for=f"the end of replica {self.name}",
            )
        except ReplicaError as error:
            return str(error)
        ended = self.processes.wait(self.place, _END_TIMEOUT_S)
        return ended if alone else None

    def _ended(self, within_s: float) -> str | None:
        """Why its process has ended; None while it runs."""
        return self.processes.ended(self.place, within_s)


def launch_replicas(spec: ReplicaSpec, processes: Processes, places: Places) -> list[Replica]:
    """Start all replicas and wait until they are ready.

    Returns:
        They, in the order of `REPLICAS`.

    Raises:
        LaunchError: They could not be started.
        ReplicaError: One ended, is silent, or said that it failed.
    """
    switchboard = Switchboard(places.directory / "replicas.sock")
    try:
        started = _start(spec, switchboard, processes, places)
        ended = _any_ended(processes, started)
        found = sorted(
            (switchboard.accept(_START_TIMEOUT_S, ended) for _ in REPLICAS),
            key=lambda pair: pair[0].index,
        )
    except ReplicaError as error:
        if spec.store == "mpi":
            raise LaunchError(
                f"mpirun could not start {len(REPLICAS)} replicas: {error}"
            ) from error
        raise
    finally:
        switchboard.close()
    replicas = [
        Replica(
            name=REPLICAS[hello.index],
            pid=hello.pid,
            channel=channel,
            place=started[hello.index],
            processes=processes,
        )
        for hello, channel in found
    ]
    for replica in replicas:
        replica.tell(spec)
    for replica in replicas:
        replica.wait_until_ready()
        print_result(f"replica {replica.name} is pid {replica.pid}")
    return replicas


def _start(
    spec: ReplicaSpec, switchboard: Switchboard, processes: Processes, places: Places
) -> list[int]:
    """Start what is to become the replicas.

    Returns:
        For each of them, the place of its process.
    """
    program = [sys.executable, "-m", _PROGRAM, str(switchboard.path)]
    if spec.store == "mpi":
        command = [mpirun(), "--with-ft", "ulfm", "-n", str(len(REPLICAS)), sys.executable]
        command += ["-m", "mpi4py", *program[1:], "mpi"]
        environment = mpi_environment(spec.num_threads, places.new_backing())
        return [processes.start("mpirun", command, environment)] * len(REPLICAS)
    environment = replica_environment(spec.num_threads)
    return [
        processes.start(f"replica {name}", [*program, str(index)], environment)
        for index, name in enumerate(REPLICAS)
    ]


def _any_ended(processes: Processes, started: Sequence[int]) -> Ended:
    """Says why one of these processes has ended, or None."""

    def ended(within_s: float) -> str | None:
        each_s = within_s / len(started)
        return next((why for place in started if (why := processes.ended(place, each_s))), None)

    return ended
