from __future__ import annotations

from radixlink.demo._pulse import INTERVAL_S, Pulse


def test_each_interval_is_told_once_with_the_tokens_so_far() -> None:
    said: list[str] = []
    now = [0.0]
    pulse = Pulse(said.append, lambda: now[0])
    pulse.begin("computing 9 tokens")
    for _ in range(10):
        pulse.forward()
        now[0] += INTERVAL_S / 4
    assert said == [
        "computing 9 tokens",
        "computing 9 tokens; tokens so far: 4",
        "computing 9 tokens; tokens so far: 8",
    ]


def test_what_begins_is_counted_anew() -> None:
    said: list[str] = []
    now = [0.0]
    pulse = Pulse(said.append, lambda: now[0])
    for text in ("one", "two"):
        pulse.begin(text)
        pulse.forward()
        now[0] += INTERVAL_S
        pulse.forward()
    assert said == ["one", "one; tokens so far: 1", "two", "two; tokens so far: 1"]
