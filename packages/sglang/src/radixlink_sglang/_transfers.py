"""SGLang's transfers as ours, and the pages that need not be moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import PageKeys, PoolHitPolicy, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from radixlink_sglang._engine import EngineTransfer


def translated(transfers: Iterable[EngineTransfer]) -> tuple[PoolTransfer, ...]:
    """The same transfers in our words; those without keys are left out.

    Raises:
        ContractError: A pool, a hit policy or a key is not known here, or slots do not fit keys.
    """
    return tuple(_translated(transfer) for transfer in transfers if transfer.keys)


def _translated(transfer: EngineTransfer) -> PoolTransfer:
    name, policy = transfer.name.value, transfer.hit_policy.value
    try:
        pool, hit_policy = PoolName(name), PoolHitPolicy(policy)
        keys = PageKeys.from_hex(transfer.keys or ())
    except ValueError as error:
        raise ContractError(
            f"SGLang: expected a transfer of a known pool and policy with hex keys, got {name!r}, "
            f"{policy!r}: {error}"
        ) from error
    indices = transfer.device_indices
    return PoolTransfer(
        name=pool,
        keys=keys,
        device_indices=None if indices is None else indices.to(torch.int64),
        hit_policy=hit_policy,
    )


def without(transfer: PoolTransfer, pages: AbstractSet[bytes]) -> PoolTransfer | None:
    """A transfer without some of its pages; None where nothing of it is left."""
    keys = transfer.keys.resolve()
    kept = [page for page, key in enumerate(keys) if key not in pages]
    if len(kept) == len(keys):
        return transfer
    if not kept:
        return None
    indices = transfer.device_indices
    if indices is not None:
        rows = torch.tensor(kept, device=indices.device)
        indices = indices.view(len(keys), -1).index_select(0, rows).view(-1)
    return attrs.evolve(
        transfer, keys=PageKeys.join(keys[page] for page in kept), device_indices=indices
    )
