"""What a rank group over gloo keeps for ever, and what it lets go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

# Documented there, but not among the module's explicit exports.
from torch.distributed import HashStore  # type: ignore[attr-defined]

from radixlink_comm.torch import TorchGroup
from radixlink_contracts.errors import AgreementError


def test_a_collective_that_gloo_cannot_begin_leaves_nothing_behind() -> None:
    group = TorchGroup.create(HashStore(), rank=0, size=1, timeout_s=30.0)
    group.all_and(bytearray(8), 30.0)
    gloo = weakref.ref(group._gloo)
    # Memory that gloo cannot send.
    group._words = torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(AgreementError, match="gloo failed"):
        group.all_and(bytearray(8), 30.0)
    gc.collect()
    assert gloo() is None
    with pytest.raises(AgreementError):
        group.all_and(bytearray(8), 30.0)
    group.close()
