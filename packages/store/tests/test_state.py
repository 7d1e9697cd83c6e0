from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixlink_store._state import (
    LAST_GENERATION,
    MATCH_MASK,
    STATE_MASK,
    SlotState,
    claimed,
    emptied,
    generation_of,
    match_of,
    pack,
    published,
)

FINGERPRINTS = st.integers(0, (1 << 16) - 1)
GENERATIONS = st.integers(0, LAST_GENERATION)
WORDS = st.integers(0, (1 << 64) - 1)


@given(FINGERPRINTS, GENERATIONS, st.sampled_from(SlotState))
def test_word_holds_its_three_parts(fingerprint: int, generation: int, state: SlotState) -> None:
    word = pack(fingerprint, generation, state)
    assert 0 <= word < 1 << 64
    assert generation_of(word) == generation
    assert word & STATE_MASK == state
    assert (word & MATCH_MASK == match_of(fingerprint)) == (state is SlotState.READY)


@given(WORDS, FINGERPRINTS)
def test_claim_starts_the_next_generation_whatever_the_slot_held(
    word: int, fingerprint: int
) -> None:
    now = claimed(word, match_of(fingerprint))
    if generation_of(word) == LAST_GENERATION:
        assert now is None
    else:
        assert now == pack(fingerprint, generation_of(word) + 1, SlotState.WRITING)


@given(FINGERPRINTS, GENERATIONS)
def test_publishing_and_emptying_keep_the_generation(fingerprint: int, generation: int) -> None:
    ready = published(pack(fingerprint, generation, SlotState.WRITING))
    assert ready == pack(fingerprint, generation, SlotState.READY)
    assert emptied(ready) == pack(0, generation, SlotState.EMPTY)
