from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._signals import EndingSignals

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """As in a terminal: whoever starts tests in the background may have them ignore signals."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    """Have this process get a signal; its handler has run when this returns."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ENDING)
def test_the_first_signal_interrupts_and_all_others_are_ignored(number: signal.Signals) -> None:
    with EndingSignals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.interrupting():
            send(number)
        for other in ENDING:
            send(other)


def clean_up_while_signals_come(signals: EndingSignals) -> None:
    """Be interrupted, and clean up inside the part that may be interrupted."""
    with signals.interrupting():
        try:
            send(signal.SIGTERM)
        except KeyboardInterrupt:
            for number in ENDING:
                send(number)


def test_the_cleanup_of_an_inner_step_is_not_interrupted_either() -> None:
    with EndingSignals() as signals:
        clean_up_while_signals_come(signals)


def test_a_signal_during_an_ordinary_cleanup_is_ignored() -> None:
    with EndingSignals() as signals:
        with signals.interrupting():
            pass
        for number in ENDING:
            send(number)


def test_a_signal_during_the_preparation_interrupts_what_follows() -> None:
    with EndingSignals() as signals:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), signals.interrupting():
            pytest.fail("began although a signal had come")


def test_signals_do_afterwards_what_they_did_before() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with EndingSignals():
        assert all(signal.getsignal(number) not in before for number in ENDING)
    assert [signal.getsignal(number) for number in ENDING] == before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EndingSignals() as signals, signals.interrupting():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def take_two_steps(signals: EndingSignals, done: list[str]) -> None:
    """Be sent a signal in a step that holds it back, then go on."""
    with signals.interrupting():
        with signals.held_back():
            send(signal.SIGTERM)
            done.append("the step")
        done.append("what follows")


def test_a_step_that_holds_signals_back_is_done_whole_before_it_is_interrupted() -> None:
    done: list[str] = []
    with EndingSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            take_two_steps(signals, done)
        assert done == ["the step"]
        send(signal.SIGINT)


def fail_while_a_signal_comes(signals: EndingSignals) -> None:
    """Fail in a step that holds a signal back."""
    with signals.interrupting(), signals.held_back():
        send(signal.SIGTERM)
        raise OSError("no such program")


def test_a_step_that_fails_while_a_signal_is_held_back_is_interrupted() -> None:
    with EndingSignals() as signals, pytest.raises(KeyboardInterrupt):
        fail_while_a_signal_comes(signals)


def test_a_step_without_a_signal_interrupts_nothing() -> None:
    with EndingSignals() as signals, signals.interrupting():
        with signals.held_back():
            pass
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_a_step_of_the_cleanup_is_not_interrupted_either() -> None:
    with EndingSignals() as signals:
        with signals.interrupting():
            pass
        with signals.held_back():
            send(signal.SIGTERM)
