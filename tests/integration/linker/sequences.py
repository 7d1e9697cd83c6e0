"""Sequences of tokens, their keys, and a request for one."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts import PageKeys, RadixKey, RequestId
from radixlink_tree import hash_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def key_of(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


def page_keys_of(tokens: Sequence[int], page_size: int) -> PageKeys:
    """The keys of the whole pages of a sequence."""
    whole = len(tokens) // page_size * page_size
    return PageKeys(hash_pages(None, array("q", tokens[:whole]).tobytes(), page_size))


@attrs.frozen(kw_only=True)
class Request:
    """A request of the engine. A `RequestKV`."""

    request_id: RequestId
    key: RadixKey

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        pass
