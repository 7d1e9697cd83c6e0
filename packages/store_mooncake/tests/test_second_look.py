"""What did not verify is judged once more: with a real Mooncake, in which things happen between two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import pytest

from radixlink_contracts import PageBits
from radixlink_store_mooncake._codes import Code
from radixlink_store_mooncake._object import TAG_BYTES, PageFormat
from radixlink_testing import SUITE_LAYOUT, put_pages, read_page_range, read_right
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from packages.store_mooncake.tests.conftest import Namespace

_KEYS: Final = page_keys(range(4))
_FORM: Final = PageFormat.of(SUITE_LAYOUT)
_PAGE: Final = 1
_OTHERS: Final = PageBits.of({0, 2, 3}, 4)
_RANGE: Final = 2
_FLIP_AT: Final = _FORM.tag_offsets[_RANGE] + TAG_BYTES


class Interposed:
    """Mooncake's client, and what happens before some of its calls."""

    def __init__(self, client: object) -> None:
        self._client = client
        #: By the call's name; each answers in the call's place, or says None.
        self.before: dict[str, list[Callable[[], object]]] = {}

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = cast("Callable[..., object]", getattr(self._client, name))

        def interposed(*arguments: object, **named: object) -> object:
            todo = self.before.get(name)
            answer = todo.pop(0)() if todo else None
            return call(*arguments, **named) if answer is None else answer

        return interposed


def _interpose(monkeypatch: pytest.MonkeyPatch, namespace: Namespace) -> Interposed:
    connection = namespace.factory._connection
    assert connection is not None
    interposed = Interposed(connection.client)
    monkeypatch.setattr(connection.pages, "_client", interposed)
    return interposed


def _nothing() -> None:
    """Happens."""


class Events:
    """What may become of a page."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._name = namespace.name_of(SUITE_LAYOUT, _KEYS[_PAGE])

    def flip(self) -> None:
        """One bit of it; another time, it is as it was."""
        self._namespace.vandal.flip(self._name, _FORM.object_bytes, _FLIP_AT)

    def go(self) -> None:
        """It is evicted."""
        self._namespace.vandal.remove(self._name)

    def is_written_anew(self) -> None:
        """It is evicted, and put again with other bytes."""
        self.go()
        store = self._namespace.factory.open(SUITE_LAYOUT)
        assert put_pages(store, _KEYS.span(_PAGE, _PAGE + 1), "later").complete

    def is_written_anew_with_damage(self) -> None:
        """The same, and then a bit of that."""
        self.is_written_anew()
        self.flip()


@pytest.mark.parametrize(
    ("event", "counted"),
    [
        ("flip", (0, 0)),
        ("go", (1, 0)),
        ("is_written_anew", (1, 0)),
        ("is_written_anew_with_damage", (1, 0)),
        (None, (0, 1)),
    ],
)
def test_what_became_of_a_page_whose_range_was_damaged(
    monkeypatch: pytest.MonkeyPatch,
    ranges: Namespace,
    event: str | None,
    counted: tuple[int, int],
) -> None:
    """It is mended, gone, of another write, whose damage is its readers', or as damaged as before."""
    store, events = ranges.factory.open(SUITE_LAYOUT), Events(ranges)
    put_pages(store, _KEYS)
    handles = store.open(_KEYS, 0.0)
    events.flip()
    happens = cast("Callable[[], None]", getattr(events, event)) if event else _nothing
    _interpose(monkeypatch, ranges).before["get_size"] = [happens]
    right, _ = read_page_range(store, handles, _RANGE)
    assert right == (PageBits.all(4) if event == "flip" else _OTHERS)
    assert (store.counters.read_stale, store.counters.corrupt) == counted
    # What is damaged is removed, and nothing else is.
    there = event not in {"go", None}
    assert store.contains(_KEYS) == (PageBits.all(4) if there else _OTHERS)


def test_page_written_anew_after_its_header_was_read_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, ranges: Namespace
) -> None:
    store, events = ranges.factory.open(SUITE_LAYOUT), Events(ranges)
    put_pages(store, _KEYS)
    handles = store.open(_KEYS, 0.0)
    events.flip()
    # The ranges of all, the header of the suspect, its range.
    before: list[Callable[[], object]] = [_nothing, _nothing, events.is_written_anew]
    _interpose(monkeypatch, ranges).before["get_into_ranges"] = before
    right, _ = read_page_range(store, handles, _RANGE)
    assert right == _OTHERS
    assert before == []
    assert (store.counters.read_stale, store.counters.corrupt) == (1, 0)
    assert store.contains(_KEYS).complete


@pytest.mark.parametrize("way", ["whole", "ranges"])
def test_second_look_without_an_answer_costs_the_suspect_and_no_other(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    namespace: Namespace = request.getfixturevalue(way)
    store = namespace.factory.open(SUITE_LAYOUT)
    put_pages(store, _KEYS)
    name = namespace.name_of(SUITE_LAYOUT, _KEYS[_PAGE])
    namespace.vandal.remove(name)
    namespace.vandal.put(name, _FORM.object_bytes)
    client = _interpose(monkeypatch, namespace)
    client.before["get_size"] = [lambda: Code.RPC_FAIL] * 2
    handles = store.open(_KEYS, 0.0)
    assert handles.found == _OTHERS
    assert read_right(store, handles) == _OTHERS
    if (lent := store.lend(4)) is not None:
        handles = store.open_lent(_KEYS, 0.0, lent)
        assert handles.found == _OTHERS
        assert store.verify(handles, _RANGE, lent) == _OTHERS
        lent.release()
    assert (way == "whole") == (not client.before["get_size"])
    # Nobody has judged it, so it is there still.
    assert store.contains(_KEYS).complete
    assert store.counters.corrupt == 0
    assert store.counters.unanswered == (2 if way == "whole" else 1)
