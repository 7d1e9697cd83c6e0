from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from radixlink_components import JoinedPageKeys
from radixlink_contracts import PageKeys, PageKeySource


def digest(page: int) -> bytes:
    return bytes([page]) * 32


class LazyKeys(PageKeySource):
    """Pages by number, counting how often somebody asked for digests."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.num_resolved = 0

    @override
    def __len__(self) -> int:
        return len(self.pages)

    @override
    def span(self, start: int, stop: int) -> LazyKeys:
        return LazyKeys(self.pages[start:stop])

    @override
    def resolve(self) -> PageKeys:
        self.num_resolved += 1
        return PageKeys.join(map(digest, self.pages))


@given(
    st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=5),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_runs_joined_are_as_one_list(runs: list[list[int]], start: int, stop: int) -> None:
    joined = JoinedPageKeys([LazyKeys(run) for run in runs])
    pages = [page for run in runs for page in run]
    assert len(joined) == len(pages)
    assert joined.resolve() == PageKeys.join(map(digest, pages))
    span = joined.span(start, stop)
    assert len(span) == len(pages[start:stop])
    assert span.resolve() == PageKeys.join(map(digest, pages[start:stop]))


def test_nothing_is_hashed_before_somebody_resolves_and_then_once() -> None:
    runs = [LazyKeys([1, 2]), LazyKeys([]), LazyKeys([3])]
    joined = JoinedPageKeys(runs)
    assert len(joined) == 3
    assert len(joined.span(1, 3)) == 2
    assert [run.num_resolved for run in runs] == [0, 0, 0]
    first = joined.resolve()
    assert joined.resolve() is first
    assert [run.num_resolved for run in runs] == [1, 0, 1]


@pytest.mark.parametrize(("start", "stop", "pages"), [(0, 2, [1, 2]), (2, 3, [3]), (1, 2, [2])])
def test_a_span_within_one_run_is_that_runs_own(start: int, stop: int, pages: list[int]) -> None:
    span = JoinedPageKeys([LazyKeys([1, 2]), LazyKeys([3])]).span(start, stop)
    assert isinstance(span, LazyKeys)
    assert span.pages == pages
