"""Page hashes are SGLang's, the same in every process and on every way to a store."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import DEFAULT_NAMESPACE, Namespace, PageKeys, RadixKey
from radixlink_contracts.errors import ContractError
from radixlink_tree import hash_pages, namespace_seed
from radixlink_tree._hashing import PAGES_BETWEEN_PAUSES

if TYPE_CHECKING:
    from .conftest import MakeRig
    from .rig import Rig

# Re-derived by hand with hashlib from SGLang 0.5.23's rule; its own function gives the same.
VECTORS = [
    (
        2,
        [1, 2, 3, 4],
        (
            "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f",
            "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c",
        ),
    ),
    (
        4,
        [1, 2, 3, 4],
        ("cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",),
    ),
    (
        1,
        [1, 2],
        (
            "67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450",
            "e95092c4b38d42d1363b9e9b06bc5d6377af1cd06651a9fedac8b36dc9e56114",
        ),
    ),
]
ADAPTER_SEED = "ad5aea43603f2a5d7b3cb72eb67799416dc43601e325d412f7afecb939b9046f"
ADAPTER_FIRST_PAGE = "61ff8cc45f935b4640cf3bd73bdf4761a0db8b5f2bd16e2d1732d05a3c339ae7"

# Each of these must be a key space of its own.
NAMESPACES = [
    Namespace(),
    Namespace(extra_key=""),
    Namespace(cache_salt=""),
    Namespace(extra_key="", cache_salt=""),
    Namespace(extra_key="a"),
    Namespace(cache_salt="a"),
    Namespace(extra_key="a", cache_salt=""),
    Namespace(extra_key="a", cache_salt="bc"),
    Namespace(extra_key="ab", cache_salt="c"),
    Namespace(extra_key="abc"),
    Namespace(extra_key="a\0"),
    Namespace(extra_key="\ud800"),  # a lone surrogate: what json.loads makes of "\\ud800"
    Namespace(extra_key="?"),
]


def packed(tokens: list[int]) -> bytes:
    """Tokens as the tree keeps them."""
    return array("q", tokens).tobytes()


def hashed(tokens: list[int], page_size: int, prior: bytes | None = None) -> tuple[str, ...]:
    return PageKeys(hash_pages(prior, packed(tokens), page_size)).hex()


def page_digest(prior: bytes, page: list[int]) -> bytes:
    """The rule, written down a second time."""
    if max(page) > 0xFFFFFFFF:
        return hashlib.sha256(prior + b"\xff" + struct.pack(f"<{len(page)}Q", *page)).digest()
    return hashlib.sha256(prior + struct.pack(f"<{len(page)}I", *page)).digest()


@pytest.mark.parametrize(("page_size", "tokens", "digests"), VECTORS)
def test_hashes_are_the_published_ones(
    page_size: int, tokens: list[int], digests: tuple[str, ...]
) -> None:
    assert hashed(tokens, page_size) == digests


def test_namespace_seeds_the_first_page_as_published() -> None:
    seed = namespace_seed(Namespace(extra_key="a"))
    assert seed is not None
    assert seed.hex() == ADAPTER_SEED
    assert hashed([1, 2], 2, seed) == (ADAPTER_FIRST_PAGE,)


def test_tree_applies_the_seed_to_the_first_page_alone(make_rig: MakeRig) -> None:
    tree = make_rig(2).tree
    key = RadixKey(array("q", [1, 2, 3, 4]), Namespace(extra_key="a"))
    first, second = tree.key_source(tree.root, key, 0).resolve()
    assert first.hex() == ADAPTER_FIRST_PAGE
    assert second == page_digest(first, [3, 4])


def test_default_namespace_has_no_seed() -> None:
    assert namespace_seed(DEFAULT_NAMESPACE) is None
    assert namespace_seed(Namespace(extra_key=None, cache_salt=None)) is None


def test_no_two_namespaces_share_a_key(make_rig: MakeRig) -> None:
    tree = make_rig(2).tree
    keys = [RadixKey(array("q", [1, 2]), namespace) for namespace in NAMESPACES]
    first_pages = {tree.key_source(tree.root, key, 0).resolve().data for key in keys}
    assert len(first_pages) == len(NAMESPACES)


@pytest.mark.parametrize(("token", "wide"), [(2**32 - 1, False), (2**32, True), (2**63 - 1, True)])
def test_page_turns_wide_above_32_bits(token: int, wide: bool) -> None:  # noqa: FBT001
    layout = b"\xff" + struct.pack("<QQ", 1, token) if wide else struct.pack("<II", 1, token)
    assert hashed([1, token], 2) == (hashlib.sha256(layout).hexdigest(),)


def test_wide_page_leaves_its_neighbours_narrow() -> None:
    first, second, third = (bytes.fromhex(h) for h in hashed([1, 2, 3, 2**40, 5, 6], 2))
    assert first == hashlib.sha256(struct.pack("<II", 1, 2)).digest()
    assert second == hashlib.sha256(first + b"\xff" + struct.pack("<QQ", 3, 2**40)).digest()
    assert third == hashlib.sha256(second + struct.pack("<II", 5, 6)).digest()


@given(
    page_size=st.sampled_from([1, 4, 16]),
    tokens=st.lists(
        st.one_of(st.integers(0, 300), st.integers(2**32 - 2, 2**32 + 2), st.just(2**63 - 1)),
        min_size=48,
        max_size=48,
    ),
    prior=st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
    first_part=st.sampled_from([0, 16, 32, 48]),
)
def test_hashing_in_parts_follows_the_rule(
    page_size: int, tokens: list[int], prior: bytes | None, first_part: int
) -> None:
    expected, last = [], prior or b""
    for start in range(0, len(tokens), page_size):
        last = page_digest(last, tokens[start : start + page_size])
        expected.append(last)
    head = hash_pages(prior, packed(tokens[:first_part]), page_size)
    tail = hash_pages(head[-32:] or prior, packed(tokens[first_part:]), page_size)
    assert list(PageKeys(head + tail)) == expected


@pytest.mark.parametrize("tokens", [[-1, 2], [1, 2, 3, -5], [2**40, 1, 2, -(2**63)]])
def test_negative_token_is_an_error_that_names_it(tokens: list[int]) -> None:
    with pytest.raises(ContractError, match=f"got {min(tokens)}$"):
        hash_pages(None, packed(tokens), 2)


def test_blocks_between_pauses_follow_the_rule() -> None:
    tokens = [*range(5 * PAGES_BETWEEN_PAUSES), 2**40, *range(PAGES_BETWEEN_PAUSES)]
    pauses: list[None] = []
    digests = hash_pages(None, packed(tokens), 1, lambda: pauses.append(None))
    assert len(pauses) == 6
    expected, last = [], b""
    for token in tokens:
        last = page_digest(last, [token])
        expected.append(last)
    assert list(PageKeys(digests)) == expected


def test_no_pages_have_no_hashes() -> None:
    assert hash_pages(None, b"", 4) == b""


@pytest.mark.parametrize("namespace", [DEFAULT_NAMESPACE, Namespace(cache_salt="tenant")])
def test_write_lookup_and_load_use_the_same_keys(rig: Rig, namespace: Namespace) -> None:
    tree = rig.tree
    tree.attach_linker(backup_threshold=1)
    rig.insert(1, 2, 3, 4, namespace=namespace)
    rig.insert(1, 2, 7, namespace=namespace)
    rig.insert(1, 2, 3, 4, 5, 6, namespace=namespace)
    middle = rig.match(1, 2, 3, namespace=namespace)
    end = rig.match(1, 2, 3, 4, 5, 6, namespace=namespace)
    key = rig.key(1, 2, 3, 4, 5, 6, tail=rig.page_size - 1, namespace=namespace)

    write = PageKeys.join(
        digest
        for node in tree._nodes.values()
        for digest in tree.node(node.node_id).page_keys.resolve()
    )
    lookup = tree.key_source(tree.root, key, 0)
    behind = tree.key_source(middle.last_device_node, key, middle.device_prefix_len)
    expected = hash_pages(
        namespace_seed(namespace), key.token_ids[: 6 * rig.page_size].tobytes(), rig.page_size
    )
    assert lookup.resolve().data == expected
    assert lookup.span(3, 6).resolve() == behind.resolve() == PageKeys(expected).span(3, 6)
    assert set(write) == {*PageKeys(expected), *other_branch(rig, namespace)}
    assert len(write) == 7
    assert len(tree.key_source(end.last_device_node, key, end.device_prefix_len)) == 0


def other_branch(rig: Rig, namespace: Namespace) -> PageKeys:
    """The keys of the pages 1, 2, 7, hashed apart from the tree."""
    tokens = rig.key(1, 2, 7).token_ids.tobytes()
    return PageKeys(hash_pages(namespace_seed(namespace), tokens, rig.page_size))


@pytest.mark.parametrize(
    ("num_bytes", "page_size"),
    [(20 * 8, 16), (20, 16), (7, 1), (16 * 8, 0), (16 * 8, -16)],
    ids=["torn page", "torn token of a page", "torn token", "no page size", "negative page size"],
)
def test_what_is_not_whole_pages_is_refused(num_bytes: int, page_size: int) -> None:
    with pytest.raises(ContractError, match=f"pages of {page_size} tokens.*got {num_bytes} bytes"):
        hash_pages(None, bytes(num_bytes), page_size)


def test_no_pages_have_no_digests() -> None:
    assert hash_pages(None, b"", 16) == b""
