"""`CudaCopier`: copies between a pool on a CUDA device and pinned staging, on its own stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from radixlink_contracts import Copier, Fence
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_pools._copiers import rows_of, widened
from radixlink_pools._staging import new_staging

if TYPE_CHECKING:
    from radixlink_contracts import ByteRegion, Staging

#: A copy of one layer range takes tens to hundreds of microseconds; CUDA has no wait with a
#: deadline.
_POLL_S: Final = 20e-6


class CudaFence(Fence):
    """The end of one copy; keeps the staging and the region alive until then.

    The region too: the memory of its index is of the caller's stream, which would have it again for
    what comes next while the copier's stream still reads it.

    Thread: any.
    """

    def __init__(self, event: torch.cuda.Event, region: ByteRegion, staging: torch.Tensor) -> None:
        """Follow an event that was recorded behind the copy."""
        self._event: Final = event
        self._region: Final = region
        self._staging: Final = staging

    @override
    def done(self) -> bool:
        """True when the copy has ended. Does not wait."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    @override
    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the copy.

        Returns:
            False when `timeout_s` seconds passed first.
        """
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


class CudaCopier(Copier):
    """Copies on its own stream. Provisional until it has run on a device.

    A copy is ordered behind what the calling thread's current stream was given before the call.
    Work of other streams (the forward that writes the rows to gather) must have been waited for
    by the caller.

    Thread: any, one call at a time.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        """Make a stream on the device.

        Args:
            device: Where the pools are. Without an index, the one that is current for the calling
                thread now; it stays so, whatever is current where copies are asked for.

        Raises:
            BackendUnavailableError: Torch has no CUDA here, or no such device.
        """
        if not torch.cuda.is_available():
            msg = (
                f"CudaCopier: expected a CUDA device for {device}, got a torch "
                f"({torch.__version__}) that sees none; use CpuCopier for pools in host memory"
            )
            raise BackendUnavailableError(msg)
        try:
            self._stream: Final = torch.cuda.Stream(torch.device(device))  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError) as exc:
            msg = (
                f"CudaCopier: expected a stream on one of {torch.cuda.device_count()} CUDA "
                f"devices, got none on {device}: {exc}"
            )
            raise BackendUnavailableError(msg) from exc
        #: With its index: without one it would be whatever is current for the thread that asks.
        self._device: Final = self._stream.device

    @override
    def staging(self, num_bytes: int) -> Staging:
        """New pinned memory; what is in it is anything.

        Raises:
            ContractError: `num_bytes` is less than 1.

        Owns: the caller; it is free when nothing refers to it.
        """
        return new_staging(num_bytes, pinned=True)

    @override
    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        """Start copying rows out of the device.

        Args:
            region: What to read; rows and index on the device.
            out: Staging. Shape: (num_pages * row bytes,) uint8.

        Raises:
            ContractError: `out` does not fit.

        Cost: one indexed copy on the device and one to the host; nothing is waited for.
        """
        rows, staged = widened(region, rows_of(region, out))
        with self._behind_the_caller():
            staged.copy_(rows.index_select(0, region.index), non_blocking=True)
            return self._fence(region, out)

    @override
    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        """Start copying rows into the device.

        Args:
            region: What to write; rows and index on the device, the rows distinct.
            source: Staging. Shape: (num_pages * row bytes,) uint8.

        Raises:
            ContractError: `source` does not fit.

        Cost: one copy to the device and one indexed copy on it; nothing is waited for.
        """
        rows, staged = widened(region, rows_of(region, source))
        with self._behind_the_caller():
            rows.index_copy_(0, region.index, staged.to(self._device, non_blocking=True))
            return self._fence(region, source)

    def _behind_the_caller(self) -> torch.cuda.StreamContext:
        """Make this copier's stream the current one, behind all that the caller's was given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _fence(self, region: ByteRegion, staging: torch.Tensor) -> CudaFence:
        """Record the end of what was just started."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaFence(event, region, staging)
