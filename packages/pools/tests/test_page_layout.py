from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts.errors import ContractError
from radixlink_pools import PageLayout, Piece


def places(pieces: tuple[Piece, ...]) -> list[tuple[int, int, int]]:
    return [(piece.stored_object, piece.num_bytes, piece.offset) for piece in pieces]


def test_an_unpacked_page_is_an_object_for_each_group() -> None:
    """Case F1: K widths 3 and 5, V 7 and 11, two tokens a page; layers 0 and 2."""
    layout = PageLayout.of([6, 10, 14, 22], [0, 2, 0, 2], [2, 2])
    assert places(layout.pieces_of(0)) == [(0, 6, 0), (1, 14, 0)]
    assert layout.pieces_of(1) == ()
    assert places(layout.pieces_of(2)) == [(0, 10, 6), (1, 22, 14)]
    assert (layout.num_objects, layout.page_bytes) == (2, 52)


def test_a_packed_page_is_one_object_with_offsets_over_all_groups() -> None:
    """Case F7: KV widths 3 and 5, drafts 13 and 19, two tokens a page."""
    layout = PageLayout.of([6, 10, 26, 38], [0, 1, 0, 1], [4])
    assert places(layout.pieces_of(0)) == [(0, 6, 0), (0, 26, 16)]
    assert [piece.layer_range for piece in layout.pieces_of(0)] == [0, 2]


def test_a_layer_may_have_several_ranges_of_a_group() -> None:
    """Case F5: two draft buffers (13, 17) after three target buffers of 3."""
    layout = PageLayout.of([3, 3, 3, 13, 17], [0, 1, 2, 0, 1], [5])
    assert places(layout.pieces_of(0)) == [(0, 3, 0), (0, 13, 9)]
    assert places(layout.pieces_of(1)) == [(0, 3, 3), (0, 17, 22)]
    assert places(layout.pieces_of(2)) == [(0, 3, 6)]


@pytest.mark.parametrize(
    ("range_bytes", "layers", "object_sizes", "message"),
    [
        ([], [], [], "at least 1 byte"),
        ([3, 0], [0, 1], [2], "at least 1 byte"),
        ([3, 3], [0], [2], "a layer for each of 2"),
        ([3], [-1], [1], "a layer for each of 1"),
        ([3, 3], [0, 1], [1], "share out 2 ranges"),
        ([3, 3], [0, 1], [2, 0], "share out 2 ranges"),
        ([3, 3], [0, 1], [], "share out 2 ranges"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    range_bytes: list[int], layers: list[int], object_sizes: list[int], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        PageLayout.of(range_bytes, layers, object_sizes)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_pieces_tile_each_object_and_layers_share_them_out(objects: list[list[int]]) -> None:
    flat = [size for sizes in objects for size in sizes]
    layers = [place % 3 for place in range(len(flat))]
    layout = PageLayout.of(flat, layers, [len(sizes) for sizes in objects])
    for number, sizes in enumerate(objects):
        pieces = [piece for piece in layout.pieces if piece.stored_object == number]
        assert [piece.layer_range for piece in pieces] == list(range(len(sizes)))
        assert [piece.offset for piece in pieces] == [sum(sizes[:i]) for i in range(len(sizes))]
        assert [piece.num_bytes for piece in pieces] == sizes
    assert sum(len(layout.pieces_of(layer)) for layer in range(3)) == len(flat)
    assert layout.page_bytes == sum(flat)
