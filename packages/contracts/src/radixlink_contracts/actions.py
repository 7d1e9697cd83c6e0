"""Cache actions: what the tree decided and its caller must do, as one closed union.

The tree does no I/O and owns no allocator. Whatever has to happen outside comes back as a tuple of these values, to be
carried out strictly in its order; a failure in the middle must not carry out earlier ones again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch

    from radixlink_contracts._ids import NodeId
    from radixlink_contracts._pools import ComponentType


@attrs.frozen(kw_only=True, eq=False)
class FreeDeviceKV:
    """Give these slots of the full pool (and their window peers) back to the allocator.

    Attributes:
        indices: Shape: (num_tokens,) int64; whole pages.
    """

    indices: torch.Tensor


@attrs.frozen(kw_only=True)
class BackupKV:
    """Offload these nodes: they were used often enough and no store is known to hold them.

    Attributes:
        node_ids: From the root down. Each node is one offload that succeeds or fails alone.
    """

    node_ids: tuple[NodeId, ...]


@attrs.frozen(kw_only=True, eq=False)
class FreeDeviceKVFullOnly:
    """Give back full slots whose window peers are already gone (provisional).

    Attributes:
        indices: Shape: (num_tokens,) int64; whole pages.
    """

    indices: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class FreeComponentDeviceSlot:
    """Give back slots of one auxiliary component (provisional).

    Attributes:
        component_type: Whose slots.
        indices: Shape: (n,) int64.
    """

    component_type: ComponentType
    indices: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class RebuildFullToSWAMapping:
    """Map full slots to window slots anew (provisional).

    Attributes:
        full_indices: Shape: (num_tokens,) int64.
        swa_indices: Shape: (num_tokens,) int64, pairwise with `full_indices`.
    """

    full_indices: torch.Tensor
    swa_indices: torch.Tensor


CacheAction: TypeAlias = (
    FreeDeviceKV
    | BackupKV
    | FreeDeviceKVFullOnly
    | FreeComponentDeviceSlot
    | RebuildFullToSWAMapping
)
"""Every action there is. Consume it by `match`, ending in `assert_never`."""
