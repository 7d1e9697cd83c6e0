"""Host memory that torch and a store see at once, without numpy."""

from __future__ import annotations

import ctypes

import torch

from radixlink_contracts import Staging
from radixlink_contracts.errors import ContractError


def new_staging(num_bytes: int, *, pinned: bool) -> Staging:
    """Fresh memory, as a tensor and as a writable buffer. What is in it is anything.

    Torch allocates it, for two reasons: it can pin it, and it does not clear it first (a
    `bytearray` of 16 MiB costs 1.5 ms, as much as the copy that it is for). Each of the two views
    keeps the memory alive by itself.

    Args:
        num_bytes: At least 1.
        pinned: Page-locked, so that a device can copy while the host goes on.

    Raises:
        ContractError: `num_bytes` is less than 1.
    """
    if num_bytes < 1:
        msg = f"staging: expected at least 1 byte, got {num_bytes}"
        raise ContractError(msg)
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    array = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    # The array does not own its memory; a memoryview keeps the array, and so the array must keep
    # the tensor.
    vars(array)["tensor"] = tensor
    return Staging(tensor=tensor, buffer=memoryview(array).cast("B"))
