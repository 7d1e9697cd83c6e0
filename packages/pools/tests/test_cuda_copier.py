"""`CudaCopier` with a torch.cuda that only says what was asked of it; no device."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from radixlink_contracts import ByteRegion
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_pools import CudaCopier

NUM_DEVICES = 2


class FakeCuda:
    """Two devices; which is current is each thread's own matter, the first at the start.

    Attributes:
        waits: A copier's device, and that of the stream that its own was ordered behind.
    """

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self._threads = threading.local()

    def set_device(self, index: int) -> None:
        self._threads.current = index

    def index_of(self, device: torch.device) -> int:
        """The device that is meant, or what torch says where there is none."""
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        if device == torch.device("cuda"):
            return int(getattr(self._threads, "current", 0))
        if device.index >= NUM_DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return device.index


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: torch.device) -> None:
        self._cuda = cuda
        self._index = cuda.index_of(device)
        self.device = torch.device("cuda", self._index)

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.waits.append((self._index, other._index))


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def stream(device: torch.device) -> FakeStream:
        return FakeStream(fake, device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: NUM_DEVICES)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return fake


def region() -> ByteRegion:
    return ByteRegion(rows=torch.zeros(4, 8, dtype=torch.uint8), index=torch.tensor([1]))


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_copier_stays_with_its_device_whatever_thread_calls(
    cuda: FakeCuda, device: str, index: int
) -> None:
    cuda.set_device(1)
    copier = CudaCopier(device)
    with ThreadPoolExecutor(1) as thread:
        fence = thread.submit(copier.gather, region(), torch.zeros(8, dtype=torch.uint8)).result()
    assert fence.wait(0.0)
    assert cuda.waits == [(index, index)]


@pytest.mark.usefixtures("cuda")
def test_a_fence_keeps_all_that_the_copy_reads() -> None:
    """The index is the caller's stream's; freed, it would be that stream's to write again."""
    copier, some = CudaCopier("cuda:0"), region()
    staging = torch.zeros(8, dtype=torch.uint8)
    kept = [weakref.ref(some.rows), weakref.ref(some.index), weakref.ref(staging)]
    fence = copier.gather(some, staging)
    del some, staging
    assert [ref() is None for ref in kept] == [False, False, False]
    assert fence.done()
    del fence
    assert [ref() is None for ref in kept] == [True, True, True]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("device", ["cpu", "cuda:2", "no such thing"])
def test_a_device_that_is_none_of_cuda_is_unavailable(device: str) -> None:
    expected = f"one of 2 CUDA devices, got none on {device}: "
    with pytest.raises(BackendUnavailableError, match=expected) as caught:
        CudaCopier(device)
    assert isinstance(caught.value.__cause__, ValueError | RuntimeError)
