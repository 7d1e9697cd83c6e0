"""`EngineRequest`: a request, as the cache sees it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import RadixKey, RequestKV
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from radixlink_contracts import RequestId


def prompt_key(prompt: Sequence[int]) -> RadixKey:
    """What of a prompt may come from a cache: all but its last token, which is always computed.

    Raises:
        ContractError: The prompt is empty.
    """
    if not prompt:
        raise ContractError("expected a prompt of at least one token, got an empty one")
    return RadixKey(array("q", prompt[:-1]))


class EngineRequest(RequestKV):
    """A request that waits. It has no slots: it gets them when it is settled what must be computed.

    So nothing can be re-pointed, and loads are staged: they end in the tree, where it matches
    again.
    """

    def __init__(self, request_id: RequestId, prompt: Sequence[int]) -> None:
        """Name it.

        Args:
            request_id: The same on all ranks; no two live requests have the same.
            prompt: At least one token.

        Raises:
            ContractError: The prompt is empty.
        """
        self._request_id = request_id
        self._key = prompt_key(prompt)

    @property
    @override
    def request_id(self) -> RequestId:
        return self._request_id

    @property
    @override
    def key(self) -> RadixKey:
        return self._key

    @override
    def repoint(self, start: int, indices: torch.Tensor) -> None:
        raise ContractError(
            f"request {self._request_id}: expected a staged load, which re-points nothing, "
            f"got {len(indices)} slots from token {start} on"
        )
