"""What a store answers: it counts only where it is about the pages that the store was asked about.

`PageBits.complete` is true of an answer about no pages, whatever was asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from radixlink_contracts import PageBits, PageStore


def answer_of(store: PageStore, call: str, bits: PageBits, num_pages: int) -> PageBits:
    """The bits that a store answered with: one for each page of the call.

    Raises:
        ContractError: It answered for more pages, or fewer.
    """
    if bits.count != num_pages:
        msg = (
            f"{call}: expected the store of {store.layout.pool} to answer for {num_pages} pages, "
            f"got an answer for {bits.count}"
        )
        raise ContractError(msg)
    return bits
