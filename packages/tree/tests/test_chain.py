"""A chain is hashed lazily and once, by any thread, whatever is split meanwhile."""

from __future__ import annotations

import random
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageKeys
from radixlink_contracts.errors import ContractError
from radixlink_tree import _chain, hash_pages
from radixlink_tree._chain import PageChain
from radixlink_tree._hashing import PAGES_BETWEEN_PAUSES

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 2
SEED = bytes(range(32))


def tokens_of(first: int, num_pages: int) -> bytes:
    return array("q", range(first, first + num_pages * PAGE_SIZE)).tobytes()


def run_of_chains(*num_pages: int) -> list[PageChain]:
    """Chains one behind the other, over the tokens 0, 1, 2 ..."""
    chains: list[PageChain] = []
    first = 0
    for count in num_pages:
        before = chains[-1] if chains else None
        seed = None if chains else SEED
        chains.append(PageChain(tokens_of(first, count), PAGE_SIZE, before=before, seed=seed))
        first += count * PAGE_SIZE
    return chains


def keys_of(start: int, stop: int) -> PageKeys:
    """The keys of pages [start, stop) of that run, hashed in one go."""
    return PageKeys(hash_pages(SEED, tokens_of(0, stop), PAGE_SIZE)).span(start, stop)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each call hashed."""
    counts: list[int] = []

    def counting(
        prior: bytes | None,
        tokens: bytes,
        page_size: int,
        pause: Callable[[], None] | None,
    ) -> bytes:
        digests = hash_pages(prior, tokens, page_size, pause)
        counts.append(len(digests) // 32)
        return digests

    monkeypatch.setattr(_chain, "hash_pages", counting)
    return counts


class Gate:
    """`hash_pages`, held up inside its first call until it is let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def __call__(
        self,
        prior: bytes | None,
        tokens: bytes,
        page_size: int,
        pause: Callable[[], None] | None,
    ) -> bytes:
        self.calls += 1
        if not self.entered.is_set():
            self.entered.set()
            assert self.let_go.wait(timeout=30)
        return hash_pages(prior, tokens, page_size, pause)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(_chain, "hash_pages", gate)
    return gate


def test_nothing_is_hashed_before_somebody_resolves(hashed: list[int]) -> None:
    chain = run_of_chains(2, 3)[-1]
    head, tail = chain.split(1)
    assert [len(chain), len(head), len(tail), len(chain.span(1, 3))] == [3, 1, 2, 2]
    assert hashed == []


def test_each_page_is_hashed_once(hashed: list[int]) -> None:
    first, second, third = run_of_chains(2, 3, 4)
    assert second.resolve() == keys_of(2, 5)
    assert third.resolve() == keys_of(5, 9)
    assert third.span(1, 2).resolve() == keys_of(6, 7)
    assert first.resolve() == keys_of(0, 2)
    assert hashed == [2, 3, 4]


def test_resolved_chain_keeps_nothing_before_it_alive() -> None:
    first, second = run_of_chains(2, 3)
    second.resolve()
    assert first.before is None
    assert second.before is None
    head, tail = second.split(1)
    assert head.before is None
    assert tail.before is None


@pytest.mark.parametrize("resolved_first", [False, True])
def test_halves_have_the_keys_of_the_whole(
    resolved_first: bool,  # noqa: FBT001
    hashed: list[int],
) -> None:
    chain = run_of_chains(2, 5)[-1]
    if resolved_first:
        chain.resolve()
        hashed.clear()
    head, tail = chain.split(2)
    assert tail.resolve() == keys_of(4, 7)
    assert head.resolve() == keys_of(2, 4)
    assert hashed == ([] if resolved_first else [2, 2, 3])


def test_halves_split_again_have_the_keys_of_the_whole() -> None:
    head, tail = run_of_chains(1, 6)[-1].split(3)
    first, second = head.split(1)
    third, fourth = tail.split(2)
    assert fourth.resolve() == keys_of(6, 7)
    assert second.resolve() == keys_of(2, 4)
    assert first.resolve() == keys_of(1, 2)
    assert third.resolve() == keys_of(4, 6)


def test_chain_behind_a_split_one_goes_on() -> None:
    first, second = run_of_chains(4, 2)
    head, tail = first.split(1)
    assert second.resolve() == keys_of(4, 6)
    assert tail.resolve() == keys_of(1, 4)
    assert head.resolve() == keys_of(0, 1)


def test_split_while_a_thread_hashes_disturbs_nobody(gate: Gate) -> None:
    chain = run_of_chains(2, 5)[-1]
    with ThreadPoolExecutor(1) as threads:
        resolving = threads.submit(chain.resolve)
        assert gate.entered.wait(timeout=30)
        head, tail = chain.split(2)
        assert tail.resolve() == keys_of(4, 7)
        gate.let_go.set()
        assert resolving.result(timeout=30) == keys_of(2, 7)
    assert head.resolve() == keys_of(2, 4)


def test_thread_that_is_overtaken_gets_the_same_keys(gate: Gate) -> None:
    chain = run_of_chains(2, 2, 2)[-1]
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(chain.resolve)
        assert gate.entered.wait(timeout=30)
        # This thread hashes all three and drops their links while the other is in the first.
        assert chain.resolve() == keys_of(4, 6)
        assert chain.before is None
        gate.let_go.set()
        assert late.result(timeout=30) == keys_of(4, 6)
    assert gate.calls == 4, "only the first chain is hashed by both"


def test_threads_that_resolve_during_splits_all_agree() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    dice = random.Random(3)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(20):
                parts = [(index * 4, chain) for index, chain in enumerate(run_of_chains(*[4] * 12))]
                resolving = []
                for _ in range(24):
                    index = dice.randrange(len(parts))
                    start, chain = parts[index]
                    resolving.append((start, len(chain), threads.submit(chain.resolve)))
                    if len(chain) > 1:
                        cut = dice.randrange(1, len(chain))
                        head, tail = chain.split(cut)
                        parts[index : index + 1] = [(start, head), (start + cut, tail)]
                for start, count, keys in resolving:
                    assert keys.result(timeout=30) == keys_of(start, start + count)
                for start, chain in parts:
                    assert chain.resolve() == keys_of(start, start + len(chain))
    finally:
        sys.setswitchinterval(interval)


def test_span_is_cut_off_at_the_end() -> None:
    chain = run_of_chains(5)[0]
    span = chain.span(1, 9)
    assert len(span) == 4
    assert len(span.span(2, 99)) == 2
    assert span.span(2, 99).resolve() == keys_of(3, 5)
    assert span.span(1, 2).span(0, 1).resolve() == keys_of(2, 3)


def test_span_behind_the_end_is_empty() -> None:
    span = run_of_chains(3)[0].span(3, 5)
    assert len(span) == 0
    assert span.resolve() == PageKeys()


def test_chain_of_no_pages_is_empty() -> None:
    chain = PageChain(b"", PAGE_SIZE, before=run_of_chains(2)[0])
    assert len(chain) == 0
    assert chain.resolve() == PageKeys()


def test_negative_token_fails_what_is_behind_it_and_nothing_before() -> None:
    good = PageChain(tokens_of(0, 2), PAGE_SIZE, before=None, seed=SEED)
    bad = PageChain(array("q", [5, -6]).tobytes(), PAGE_SIZE, before=good)
    behind = PageChain(tokens_of(0, 1), PAGE_SIZE, before=bad)
    for _ in range(2):
        with pytest.raises(ContractError, match="got -6"):
            behind.resolve()
    assert good.resolve() == keys_of(0, 2)


def test_ten_thousand_chains_resolve_without_recursion() -> None:
    last = run_of_chains(*[1] * 10_000)[-1]
    assert last.resolve() == keys_of(9_999, 10_000)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([4 * PAGES_BETWEEN_PAUSES + 1], id="one long run"),
        pytest.param([1] * (4 * PAGES_BETWEEN_PAUSES + 1), id="many short runs"),
        pytest.param([PAGES_BETWEEN_PAUSES - 1, 2] * 4, id="runs that overlap a block"),
    ],
)
def test_no_more_than_a_block_is_hashed_between_pauses(hashed: list[int], runs: list[int]) -> None:
    chains = run_of_chains(*runs)
    so_far: list[int] = []
    # What a run had hashed when it paused inside is not told by `hashed`, but is no more than it has.
    keys = chains[-1].resolve(lambda: so_far.append(sum(hashed)))
    assert len(keys) == runs[-1]
    assert keys == keys_of(sum(runs[:-1]), sum(runs))
    assert len(so_far) >= sum(runs) // PAGES_BETWEEN_PAUSES
    short = [done for done in so_far if done]
    assert all(
        after - before <= PAGES_BETWEEN_PAUSES
        for before, after in zip([0, *short], short, strict=False)
    )
