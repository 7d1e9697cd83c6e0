"""Cache actions: what the tree decided and its caller must do, as one closed union.

The tree does no I/O and owns no allocator. Whatever has to happen outside comes back as a tuple of these values, to be
carried out strictly in its order; a failure in the middle must not carry out earlier ones again.

Window slots are named by the full slots beside them: the allocator knows the pairs, and nothing is known twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch

    from radixlink_contracts._ids import NodeId


@attrs.frozen(kw_only=True, eq=False)
class FreeDeviceKV:
    """Give these full slots back, and the window slots beside them.

    Attributes:
        indices: Shape: (num_tokens,) int64; whole pages.
    """

    indices: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class FreeDeviceKVFullOnly:
    """Give back full slots that have no window slots beside them any more.

    Attributes:
        indices: Shape: (num_tokens,) int64; whole pages.
    """

    indices: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class FreeSWA:
    """Give back the window slots beside these full slots, which stay.

    Attributes:
        full_indices: Shape: (num_tokens,) int64; whole pages.
    """

    full_indices: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class MoveSWA:
    """The window slots beside some full slots are from now on beside others, which have none.

    A window came back for full slots that somebody reads, so that these stay and the newer ones go.

    Attributes:
        from_full: Shape: (num_tokens,) int64; whole pages.
        to_full: Shape: (num_tokens,) int64, pairwise with `from_full`.
    """

    from_full: torch.Tensor
    to_full: torch.Tensor


@attrs.frozen(kw_only=True)
class FreeMambaSlots:
    """Give back recurrent-state slots.

    Attributes:
        slots: In the order in which their nodes gave them up.
    """

    slots: tuple[int, ...]


@attrs.frozen(kw_only=True)
class BackupKV:
    """Offload these nodes: they were used often enough and no store is known to hold all they have.

    Attributes:
        node_ids: From the root down. Each node is one offload that succeeds or fails alone.
    """

    node_ids: tuple[NodeId, ...]


CacheAction: TypeAlias = (
    FreeDeviceKV | FreeDeviceKVFullOnly | FreeSWA | MoveSWA | FreeMambaSlots | BackupKV
)
"""Every action there is. Consume it by `match`, ending in `assert_never`."""
