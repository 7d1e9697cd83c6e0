"""`PageLayout`: where each buffer's bytes of a page lie in what is stored. Numbers only, no torch.

A page is stored *packed*, as one object that holds the ranges of all groups one after another, or
*unpacked*, as one object for each group. Either way a range lies at one place of one object, which
is the same for every page:

    two layers, groups K (6 and 10 bytes) and V (14 and 22 bytes)

    packed      object 0:  K0 @0   K1 @6   V0 @16   V1 @30
    unpacked    object 0:  K0 @0   K1 @6
                object 1:  V0 @0   V1 @14
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence


@attrs.frozen(kw_only=True)
class Piece:
    """One buffer's bytes of a page, in what is stored.

    Attributes:
        layer_range: Which range of its object: the index that `PageStore.read` takes.
        stored_object: Which object of the page; 0 when they are packed into one.
        offset: Bytes before it in its object.
        num_bytes: How long it is.
    """

    layer_range: int
    stored_object: int
    offset: int
    num_bytes: int


@attrs.frozen(kw_only=True)
class PageLayout:
    """The pieces of a page, in stored order.

    Attributes:
        pieces: All of them, object after object.
        layers: The model's layer of each piece. Shape: (pieces,).
    """

    pieces: tuple[Piece, ...]
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls, range_bytes: Sequence[int], layers: Sequence[int], object_sizes: Sequence[int]
    ) -> PageLayout:
        """Lay ranges out one after another.

        Args:
            range_bytes: Bytes of a page in each range, in stored order.
            layers: The model's layer of each range.
            object_sizes: How many ranges each stored object takes, in that order.

        Raises:
            ContractError: The numbers do not fit each other, or there is nothing to lay out.
        """
        if not range_bytes or min(range_bytes) < 1:
            msg = f"PageLayout: expected ranges of at least 1 byte, got {tuple(range_bytes)}"
            raise ContractError(msg)
        if len(layers) != len(range_bytes) or min(layers) < 0:
            msg = (
                f"PageLayout: expected a layer for each of {len(range_bytes)} ranges, "
                f"got {tuple(layers)}"
            )
            raise ContractError(msg)
        if not object_sizes or min(object_sizes) < 1 or sum(object_sizes) != len(range_bytes):
            msg = (
                f"PageLayout: expected stored objects that share out {len(range_bytes)} ranges, "
                f"got {tuple(object_sizes)}"
            )
            raise ContractError(msg)
        pieces: list[Piece] = []
        for stored_object, (start, end) in enumerate(pairwise(accumulate(object_sizes, initial=0))):
            sizes = range_bytes[start:end]
            offsets = accumulate(sizes, initial=0)
            pieces += [
                Piece(
                    layer_range=layer_range,
                    stored_object=stored_object,
                    offset=offset,
                    num_bytes=size,
                )
                for layer_range, (size, offset) in enumerate(zip(sizes, offsets, strict=False))
            ]
        return cls(pieces=tuple(pieces), layers=tuple(layers))

    @property
    def num_objects(self) -> int:
        """Objects that a page is stored as."""
        return self.pieces[-1].stored_object + 1

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all its objects."""
        return sum(piece.num_bytes for piece in self.pieces)

    def pieces_of(self, layer: int) -> tuple[Piece, ...]:
        """What must have landed before a layer may run; nothing where it has nothing in this pool.

        Cost: O(pieces).
        """
        return tuple(
            piece for piece, owner in zip(self.pieces, self.layers, strict=True) if owner == layer
        )
