"""`PageClient`: Mooncake's batch calls on objects of one size, with deadlines and tries.

What may pass is tried again: no room (eviction runs behind), an owner that did not answer (another
replica, or another owner for a put, may), a lease that ended. Tries are few, their pauses short, and
the deadline of the call bounds them all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from radixlink_store_mooncake._codes import (
    GET_TRANSIENT,
    PUT_TRANSIENT,
    REMOVE_TRANSIENT,
    Code,
)
from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_store_mooncake._calls import Calls
    from radixlink_store_mooncake._engine import MooncakeClient, ReplicateConfig
    from radixlink_store_mooncake._staging import Block

_PAUSES_S: Final = (0.02, 0.05, 0.1)
"""Between tries: longer than eviction's interval of 10 ms."""


class PageClient:
    """Batch calls, in the order of their keys.

    Thread: any, several at once.
    Errors: `UnansweredError` where a call did not return in time, was not made, or found no master.
    """

    def __init__(
        self,
        client: MooncakeClient,
        config: ReplicateConfig,
        calls: Calls,
        timeout_s: float,
    ) -> None:
        """Call a client that is connected."""
        self._client: Final = client
        self._config: Final = config
        self._calls: Final = calls
        self.timeout_s: Final = timeout_s

    def exist(self, keys: list[str]) -> list[int]:
        """1 for each object that is there; raises its recency."""
        deadline = time.monotonic() + self.timeout_s
        return self._answered(lambda: self._client.batch_is_exist(keys), deadline, None)

    def get(self, keys: Sequence[str], block: Block, size: int) -> list[int]:
        """Whole objects into a block, one after the other at multiples of `size`.

        Returns:
            Bytes of each, or a negative code.
        """
        addresses = range(block.address, block.address + len(keys) * size, size)
        return self._tried(
            keys,
            lambda some: self._client.batch_get_into(
                [keys[i] for i in some], [addresses[i] for i in some], [size] * len(some)
            ),
            GET_TRANSIENT,
            block,
        )

    def get_range(self, keys: Sequence[str], block: Block, offset: int, size: int) -> list[int]:
        """The same range of each object into a block, one after the other.

        Returns:
            `size` for each, or a negative code.
        """

        def get(some: Sequence[int]) -> list[int]:
            count = len(some)
            ((*codes,),) = self._client.get_into_ranges(
                [block.address],
                [[keys[i] for i in some]],
                [[[i * size] for i in some]],
                [[[offset]] * count],
                [[[size]] * count],
            )
            return [code for (code,) in codes]

        return self._tried(keys, get, GET_TRANSIENT, block)

    def put(
        self, keys: Sequence[str], block: Block, offsets: Sequence[int], size: int
    ) -> list[int]:
        """Objects of `size` out of a block, each at its offset; one that is there stays."""
        addresses = [block.address + offset for offset in offsets]
        return self._tried(
            keys,
            lambda some: self._client.batch_put_from(
                [keys[i] for i in some],
                [addresses[i] for i in some],
                [size] * len(some),
                self._config,
            ),
            PUT_TRANSIENT,
            block,
        )

    def remove(self, key: str) -> int:
        """The object is gone, whoever reads it."""
        (code,) = self._tried(
            [key], lambda _: self._client.batch_remove([key], force=True), REMOVE_TRANSIENT, None
        )
        return code

    def size(self, key: str) -> int:
        """Bytes of an object, or a negative code."""
        deadline = time.monotonic() + self.timeout_s
        return self._answered(lambda: [self._client.get_size(key)], deadline, None)[0]

    def _tried(
        self,
        keys: Sequence[str],
        call: Callable[[Sequence[int]], list[int]],
        transient: frozenset[Code],
        block: Block | None,
    ) -> list[int]:
        """The codes of a call for some keys, after further tries for those with a transient one."""
        deadline = time.monotonic() + self.timeout_s
        codes = self._answered(lambda: call(range(len(keys))), deadline, block)
        for pause in _PAUSES_S:
            again = [i for i, code in enumerate(codes) if code in transient]
            if not again or time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
            try:
                tried = self._answered(lambda some=again: call(some), deadline, block)  # type: ignore[misc]
            except UnansweredError:
                # What the first tries did stays true; the rest keeps its codes.
                break
            for i, code in zip(again, tried, strict=True):
                codes[i] = code
        return codes

    def _answered(
        self, call: Callable[[], list[int]], deadline: float, block: Block | None
    ) -> list[int]:
        """What a call returns, unless it found no master."""
        codes = self._calls.run(call, deadline - time.monotonic(), block)
        if Code.RPC_FAIL in codes:
            raise UnansweredError(
                f"Mooncake: expected an answer from the master, got code {Code.RPC_FAIL}; is it "
                f"gone?",
                transient=True,
            )
        return codes
