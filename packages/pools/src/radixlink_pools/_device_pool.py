"""`DevicePoolEntry`: one physical pool of an engine as rows of bytes, and where they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from radixlink_contracts import ByteRegion, DevicePool, PoolName, PoolTransfer, Shard
from radixlink_contracts.errors import ContractError
from radixlink_pools._page_layout import PageLayout, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_pools._buffers import LayerBuffers


class DevicePoolEntry(DevicePool):
    """One physical pool, a row of bytes for each page in each layer range.

    Packed, which is the default, a page is one stored object, and this is a `DevicePool` for its
    store. Unpacked, a page is several; each of `objects` then is a `DevicePool` for a store of its
    own, and this shows all of their ranges in a row.

    A sidecar has no transfers of its own: `source` names the transfer whose indices it borrows, and
    `own_indices` makes its own of them (an indexer with slots elsewhere, for example).

    What a caller of `page_rows` and `copy_pages` has to see to where indices are on a device: they
    are read on the calling thread's current stream, so what writes them must be of that stream or
    waited for before. A transfer that another thread will resolve needs the latter, for its
    `index_mapper` too; the answers of the allocators here are so already.

    Thread: any; nothing here changes after construction.
    """

    def __init__(
        self,
        name: PoolName,
        rows: Sequence[torch.Tensor],
        page_size: int,
        *,
        layers: Sequence[int] | None = None,
        object_sizes: Sequence[int] | None = None,
        source: PoolName | None = None,
        index_mapper: Callable[[torch.Tensor], torch.Tensor] | None = None,
        replicated: bool = False,
    ) -> None:
        """Take the rows as they are; they share memory with the engine's pool.

        Args:
            name: Which pool.
            rows: One tensor for each layer range, in stored order, as `byte_rows` returns it.
                Shape of each: (num_pages, bytes of a page in this range) uint8.
            page_size: Slots of a page; 1 where a slot holds a whole page's state.
            layers: The model's layer of each range. None: range i is of layer i.
            object_sizes: How many ranges each stored object of a page takes. None: one takes all.
            source: The transfer whose indices this pool takes. None: that of its own name.
            index_mapper: Makes this pool's slots of the source's. Shape of both: (n,) int64; a page
                of the one for a page of the other. None: they are the same.
            replicated: Every rank holds the same bytes, so that they are stored once.

        Raises:
            ContractError: There are no rows, or they are no rows of bytes, or not as many in each
                range, or the other numbers do not fit them.
        """
        if not rows:
            msg = f"DevicePoolEntry {name}: expected layer ranges, got no storage buffers"
            raise ContractError(msg)
        if page_size < 1:
            msg = f"DevicePoolEntry {name}: expected a page_size of at least 1, got {page_size}"
            raise ContractError(msg)
        for layer_range, tensor in enumerate(rows):
            if tensor.dtype is not torch.uint8 or tensor.ndim != 2 or not tensor.numel():  # noqa: PLR2004 -- rows of bytes
                msg = (
                    f"DevicePoolEntry {name}: expected (num_pages, row bytes) uint8 in range "
                    f"{layer_range}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
                raise ContractError(msg)
            if len(tensor) != len(rows[0]) or tensor.device != rows[0].device:
                msg = (
                    f"DevicePoolEntry {name}: expected {len(rows[0])} pages on {rows[0].device} in "
                    f"range {layer_range}, got {len(tensor)} on {tensor.device}"
                )
                raise ContractError(msg)
        self._name: Final = name
        # The same memory; but a tensor made in inference mode cannot be written outside it.
        with torch.inference_mode(mode=False):
            self._rows: Final = tuple(tensor.detach() for tensor in rows)
        self._page_size: Final = page_size
        self._num_pages: Final = len(rows[0])
        self._range_bytes: Final = tuple(tensor.shape[1] for tensor in rows)
        self._offsets: Final = torch.arange(page_size, device="cpu")
        self._source: Final = name if source is None else source
        self._index_mapper: Final = index_mapper
        self._replicated: Final = replicated
        self._layout: Final = PageLayout.of(
            self._range_bytes,
            range(len(rows)) if layers is None else layers,
            (len(rows),) if object_sizes is None else object_sizes,
        )
        self._objects: Final = self._split_into_objects()

    @classmethod
    def of_buffers(
        cls,
        name: PoolName,
        buffers: LayerBuffers,
        page_size: int,
        *,
        packed: bool = True,
        source: PoolName | None = None,
        index_mapper: Callable[[torch.Tensor], torch.Tensor] | None = None,
        replicated: bool = False,
    ) -> DevicePoolEntry:
        """Take an engine's tensors, group after group.

        Args:
            name: Which pool.
            buffers: The tensors and the layers they are of.
            page_size: Slots of a page; 1 for states.
            packed: A page is one stored object; otherwise one for each group.
            source: See the constructor.
            index_mapper: See the constructor.
            replicated: See the constructor.

        Raises:
            ContractError: A tensor has no rows of bytes, or not as many pages as the others.
        """
        rows, layer_of = buffers.rows(page_size), buffers.layer_of
        return cls(
            name,
            rows,
            page_size,
            layers=layer_of * len(buffers.groups),
            object_sizes=None if packed else (len(layer_of),) * len(buffers.groups),
            source=source,
            index_mapper=index_mapper,
            replicated=replicated,
        )

    @property
    @override
    def name(self) -> PoolName:
        """Which pool."""
        return self._name

    @property
    @override
    def range_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each layer range."""
        return self._range_bytes

    @property
    @override
    def layers(self) -> tuple[int, ...]:
        """The model's layer of each range; several ranges may be of one."""
        return self._layout.layers

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page."""
        return self._page_size

    @property
    def num_pages(self) -> int:
        """Pages of the pool, reserved ones included."""
        return self._num_pages

    @property
    def source(self) -> PoolName:
        """The transfer whose indices this pool takes; its own name's where it is no sidecar."""
        return self._source

    @property
    def replicated(self) -> bool:
        """True when every rank holds the same bytes."""
        return self._replicated

    @property
    def layout(self) -> PageLayout:
        """Where the ranges of a page lie in what is stored."""
        return self._layout

    @property
    def objects(self) -> tuple[DevicePoolEntry, ...]:
        """A pool for each stored object of a page: itself where they are packed into one."""
        return self._objects or (self,)

    def pieces_of(self, layer: int) -> tuple[Piece, ...]:
        """What must have landed before a layer may run; nothing where it is not in this pool."""
        return self._layout.pieces_of(layer)

    def shard(self, rank: int, num_ranks: int) -> Shard:
        """The part of each page that a rank holds.

        Raises:
            ContractError: There is no such rank.
        """
        shard = Shard(index=rank, count=num_ranks)
        return Shard() if self._replicated else shard

    def own_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """This pool's slots for those of its source. Shape of both: (n,) int64."""
        return indices if self._index_mapper is None else self._index_mapper(indices)

    @override
    def page_rows(self, transfer: PoolTransfer) -> torch.Tensor:
        """The rows of a transfer's pages, on the pool's device.

        Args:
            transfer: One of this pool. Slots on a device must have been written before, as the
                calling thread's current stream sees it; see the class.

        Returns:
            Shape: (num_pages,) int64; there already, for any stream to read.

        Raises:
            ContractError: The transfer has no slots or is another pool's, a page is not
                contiguous and aligned, or is outside the pool.

        Cost: O(slots), no loop over pages. Waits for what the calling thread's current stream was
            given: where the slots are on a device, to fetch them, and where the pool is on one, to
            send the rows.
        """
        slots = transfer.device_indices
        if slots is None or transfer.name is not self._name:
            got = "no slots" if slots is None else f"a transfer of {transfer.name}"
            msg = f"DevicePoolEntry {self._name}: expected a transfer of its own slots, got {got}"
            raise ContractError(msg)
        if slots.ndim != 1 or slots.dtype is not torch.int64:
            msg = (
                f"DevicePoolEntry {self._name}: expected (num_slots,) int64, "
                f"got {tuple(slots.shape)} {slots.dtype}"
            )
            raise ContractError(msg)
        if slots.numel() != len(transfer.keys) * self._page_size:
            msg = (
                f"DevicePoolEntry {self._name}: expected a multiple of page_size "
                f"{self._page_size}, a page for each of {len(transfer.keys)} keys, "
                f"got {slots.numel()} slots"
            )
            raise ContractError(msg)
        # Decided in host memory, where there is nothing to wait for.
        slots = slots.cpu()
        pages = slots
        if self._page_size > 1:
            pages = slots[:: self._page_size].div(self._page_size, rounding_mode="floor")
            expected = torch.add(self._offsets, pages.unsqueeze(1), alpha=self._page_size)
            if not torch.equal(slots, expected.view(-1)):
                place = int((slots != expected.view(-1)).nonzero()[0])
                msg = (
                    f"DevicePoolEntry {self._name}: expected aligned contiguous pages of "
                    f"{self._page_size} slots, got slot {int(slots[place])} at place {place}"
                )
                raise ContractError(msg)
        low, high = pages.aminmax()
        if low < 0 or high >= self._num_pages:
            page = int(low if low < 0 else high)
            msg = (
                f"DevicePoolEntry {self._name}: expected pages in 0..{self._num_pages - 1}, "
                f"got {page}, which exceeds the pool"
            )
            raise ContractError(msg)
        return pages.to(self._rows[0].device)

    @override
    def region(self, layer_range: int, page_rows: torch.Tensor) -> ByteRegion:
        """Those rows in one layer range.

        Args:
            layer_range: Index into `range_bytes`.
            page_rows: From `page_rows`. Shape: (num_pages,) int64.

        Raises:
            ContractError: There is no such range.
        """
        if not 0 <= layer_range < len(self._rows):
            msg = (
                f"DevicePoolEntry {self._name}: expected a layer range in "
                f"0..{len(self._rows) - 1}, got {layer_range}"
            )
            raise ContractError(msg)
        return ByteRegion(rows=self._rows[layer_range], index=page_rows)

    def copy_pages(self, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
        """The target pages hold what the source pages hold; the source is as before.

        For the private copy that a request gets of a shared state. On a device it is ordered on the
        calling thread's current stream, as a forward is that is launched after it. The copy is not
        waited for, but what that stream was given before is: the indices are fetched from a device
        to be checked, and sent to the pool's from elsewhere.

        Args:
            source_rows: Pages to copy. Shape: (n,) int64.
            target_rows: Where to, each page once and none of the source's. Shape: (n,) int64.

        Raises:
            ContractError: They are not equally many, not distinct, or outside the pool. Nothing is
                copied then.

        Cost: one gather and one indexed copy for each range, no loop over pages.
        """
        device = self._rows[0].device
        source, target = source_rows.tolist(), target_rows.tolist()
        distinct = {*source, *target}
        if (
            len(source) != len(target)
            or len(distinct) != len({*source}) + len(target)
            or not distinct.issubset(range(self._num_pages))
        ):
            msg = (
                f"DevicePoolEntry {self._name}: expected to copy pages in 0..{self._num_pages - 1} "
                f"to as many others, got {source} to {target}"
            )
            raise ContractError(msg)
        from_rows, to_rows = source_rows.to(device), target_rows.to(device)
        for rows in self._rows:
            rows.index_copy_(0, to_rows, rows.index_select(0, from_rows))

    def _split_into_objects(self) -> tuple[DevicePoolEntry, ...]:
        """A pool for each stored object; none where there is one only."""
        if self._layout.num_objects == 1:
            return ()
        ranges: list[list[int]] = [[] for _ in range(self._layout.num_objects)]
        for place, piece in enumerate(self._layout.pieces):
            ranges[piece.stored_object].append(place)
        return tuple(
            DevicePoolEntry(
                self._name,
                [self._rows[place] for place in places],
                self._page_size,
                layers=[self._layout.layers[place] for place in places],
                source=self._source,
                index_mapper=self._index_mapper,
                replicated=self._replicated,
            )
            for places in ranges
        )
