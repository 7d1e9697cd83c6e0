"""`EngineRequest`: a request, as the cache sees it, and what was said of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from radixlink_contracts import RadixKey, RequestKV
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import RequestId, StepReport


def prompt_key(prompt: Sequence[int]) -> RadixKey:
    """What of a prompt, at least one token, may come from a cache.

    All but its last token, which is always computed.
    """
    return RadixKey(array("q", prompt[:-1]))


def token_ids(prompt: Sequence[int], vocab_size: int | None, call: str) -> tuple[int, ...]:
    """A prompt as plain integers.

    Args:
        prompt: What a caller gave.
        vocab_size: Ids are below; None where nobody knows.
        call: Whose argument it is, and of which request.

    Raises:
        ContractError: It is empty, has something else than integers, or an id that the model lacks.

    Cost: O(tokens), some ns each.
    """
    try:
        ids = array("q", tuple(prompt))
    except (TypeError, OverflowError) as error:
        raise ContractError(f"{call}: expected a prompt of token ids, got {error}") from error
    if not ids:
        raise ContractError(f"{call}: expected a prompt of at least one token, got an empty one")
    low, high = min(ids), max(ids)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        below = "" if vocab_size is None else f"..{vocab_size - 1}"
        raise ContractError(
            f"{call}: expected token ids of 0{below}, got {wrong} at {ids.index(wrong)}"
        )
    return tuple(ids)


class EngineRequest(RequestKV):
    """A request that waits. It takes slots when it is settled what must be computed.

    A layer-wise load gives it slots that are the cache's. When it has landed, the request matches
    again, as after a staged one, so it matters no more where the cache has moved them.
    """

    def __init__(self, request_id: RequestId, prompt: Sequence[int]) -> None:
        """Name it.

        Args:
            request_id: The same on all ranks; no two live requests have the same.
            prompt: At least one token.
        """
        self._request_id = request_id
        self._key = prompt_key(prompt)
        self._loading = torch.empty(0, dtype=torch.int64)
        #: A report named it since it was last asked for: it is worth to match again.
        self.may_match = False
        #: Its layer-wise load failed: nothing that was computed behind it counts.
        self.load_failed = False

    @property
    @override
    def request_id(self) -> RequestId:
        return self._request_id

    @property
    @override
    def key(self) -> RadixKey:
        return self._key

    @property
    def loading(self) -> torch.Tensor:
        """The slots of its layer-wise load, behind its device prefix. Shape: (n,) int64."""
        return self._loading

    @override
    def repoint(self, start: int, indices: torch.Tensor) -> None:
        self._loading = indices

    def note(self, report: StepReport) -> None:
        """Take in what a report says of it. Cost: O(requests that the report names)."""
        failed = self._request_id in report.failed
        self.load_failed = self.load_failed or failed
        if failed or self._request_id in report.landed or self._request_id in report.ready:
            self.may_match = True
