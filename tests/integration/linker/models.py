"""What kinds of attention state a model has, and how much room an engine has for each."""

from __future__ import annotations

import attrs

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName, Shard
from radixlink_tree import StateRules, UnifiedTreeCore


@attrs.frozen(kw_only=True)
class Model:
    """A component set, with its sizes.

    Attributes:
        page_size: Tokens.
        window: Tokens that sliding-window attention looks back; 0 for none.
        states: There are recurrent states.
        num_swa_pages: Pages of the window pool.
        num_states: States of their pool.
        rules: The tree's rules for states.
    """

    page_size: int = 2
    window: int = 0
    states: bool = False
    num_swa_pages: int = 32
    num_states: int = 16
    rules: StateRules = attrs.field(factory=StateRules)

    @property
    def pools(self) -> dict[PoolName, tuple[int, ...]]:
        """The bytes of a page, or a state, in each layer range of each pool."""
        pools: dict[PoolName, tuple[int, ...]] = {PoolName.KV: (3, 5)}
        if self.window:
            pools[PoolName.SWA] = (4, 2)
        if self.states:
            pools[PoolName.MAMBA] = (9, 6)
        return pools

    @property
    def window_pages(self) -> int:
        """Pages of a window."""
        return -(-self.window // self.page_size)

    def rows(self, pool: PoolName, num_pages: int) -> int:
        """How many pages or states a pool has, in an engine with so many full pages."""
        match pool:
            case PoolName.KV:
                return num_pages
            case PoolName.SWA:
                return self.num_swa_pages
            case _:
                return self.num_states

    def slots_of_page(self, pool: PoolName) -> int:
        """Slots of a page of a pool: a state is one."""
        return 1 if pool is PoolName.MAMBA else self.page_size

    def tree(self) -> UnifiedTreeCore:
        return UnifiedTreeCore(
            page_size=self.page_size,
            sliding_window=self.window,
            states=self.rules if self.states else None,
        )

    def layout(self, pool: PoolName, shard: Shard) -> PoolLayout:
        """What a store of one pool holds."""
        identity = CacheIdentity(
            model="test",
            revision="1",
            dtype="uint8",
            page_size=self.page_size,
            num_layers=2,
            layout="bytes",
        )
        return PoolLayout(identity=identity, pool=pool, shard=shard, range_bytes=self.pools[pool])


FULL = Model()
FULL_SWA = Model(window=3)
FULL_MAMBA = Model(states=True)
FULL_SWA_MAMBA = Model(window=3, states=True)

KINDS = {
    "full": FULL,
    "full+swa": FULL_SWA,
    "full+mamba": FULL_MAMBA,
    "full+swa+mamba": FULL_SWA_MAMBA,
}
"""The component sets, by name."""
