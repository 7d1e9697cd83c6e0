from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import DEFAULT_NAMESPACE, PAGE_KEY_BYTES, Namespace, PageKeys, RadixKey
from radixlink_contracts.errors import ContractError

digests = st.lists(st.binary(min_size=PAGE_KEY_BYTES, max_size=PAGE_KEY_BYTES), max_size=6)


@given(digests)
def test_keys_are_as_the_list_of_their_digests(pages: list[bytes]) -> None:
    keys = PageKeys.join(pages)
    assert list(keys) == pages
    assert [keys[page] for page in range(len(keys))] == pages
    assert len(keys) == len(pages)
    assert len(keys.data) == PAGE_KEY_BYTES * len(pages)
    assert keys.resolve() is keys


@given(digests, st.integers(0, 7), st.integers(0, 7))
def test_a_span_is_a_slice(pages: list[bytes], start: int, stop: int) -> None:
    assert list(PageKeys.join(pages).span(start, stop)) == pages[start:stop]


@given(digests)
def test_hex_is_lower_case_and_comes_back(pages: list[bytes]) -> None:
    keys = PageKeys.join(pages)
    assert keys.hex() == tuple(page.hex() for page in pages)
    assert PageKeys.from_hex(keys.hex()) == keys


@given(digests, digests)
def test_keys_are_equal_when_their_digests_are(left: list[bytes], right: list[bytes]) -> None:
    first, second = PageKeys.join(left), PageKeys.join(right)
    assert (first == second) == (left == right)
    assert len({first, PageKeys.join(left)}) == 1


@pytest.mark.parametrize("num_bytes", [1, 31, 33, 63])
def test_a_torn_digest_is_refused(num_bytes: int) -> None:
    with pytest.raises(ContractError, match=f"multiple of 32 bytes, got {num_bytes}"):
        PageKeys(bytes(num_bytes))


@pytest.mark.parametrize("page", [-1, 2])
def test_a_page_beyond_the_run_is_an_index_error(page: int) -> None:
    with pytest.raises(IndexError, match=rf"0\.\.1, got {page}"):
        PageKeys(bytes(64))[page]


def test_a_radix_key_keeps_the_callers_array() -> None:
    tokens = array("q", [1, 2, 3])
    key = RadixKey(tokens)
    assert key.token_ids is tokens
    assert len(key) == 3
    assert key.namespace is DEFAULT_NAMESPACE


@pytest.mark.parametrize("typecode", ["Q", "l", "i"])
def test_a_radix_key_takes_no_other_integers(typecode: str) -> None:
    with pytest.raises(ContractError, match=rf"array\('q'\), got array\('{typecode}'\)"):
        RadixKey(array(typecode, [1]))


def test_namespaces_tell_none_from_empty_and_key_from_salt() -> None:
    spaces = {
        Namespace(extra_key, cache_salt)
        for extra_key in (None, "", "a")
        for cache_salt in (None, "", "a")
    }
    assert len(spaces) == 9
    assert Namespace() == DEFAULT_NAMESPACE
