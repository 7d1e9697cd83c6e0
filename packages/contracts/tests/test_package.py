from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest

import radixlink_contracts
from radixlink_contracts import (
    ComponentType,
    ExternalLinkerLoadPhase,
    LinkerTransferPhase,
    NodeId,
    PoolHitPolicy,
    PoolName,
    actions,
)

#: Imports every module of the package where torch and numpy cannot be imported, and prints which
#: other distributions came in.
IMPORT_WITHOUT_TORCH = """
import json, pkgutil, sys
sys.modules["torch"] = sys.modules["numpy"] = None
before = set(sys.modules)
import radixlink_contracts
for module in pkgutil.walk_packages(radixlink_contracts.__path__, "radixlink_contracts."):
    __import__(module.name)
foreign = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(json.dumps([sorted(foreign), sys.modules["torch"] is None, sys.modules["numpy"] is None]))
"""


def test_the_contracts_need_no_torch_at_run_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    foreign, no_torch, no_numpy = json.loads(done.stdout)
    assert foreign == ["attr", "attrs", "radixlink_contracts", "typing_extensions"]
    assert no_torch
    assert no_numpy


def test_every_public_name_is_there_once() -> None:
    names = radixlink_contracts.__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(radixlink_contracts, name)] == []


def test_names_that_stores_and_engines_keep_never_change() -> None:
    assert [pool.value for pool in PoolName] == ["kv", "swa", "mamba", "indexer", "draft"]
    assert [policy.value for policy in PoolHitPolicy] == ["all_pages", "trailing_pages"]
    assert [phase.value for phase in LinkerTransferPhase] == ["lookup", "load", "offload"]
    assert [phase.value for phase in ExternalLinkerLoadPhase] == ["prepare", "commit", "abort"]
    assert [(kind.name, kind.value) for kind in ComponentType] == [
        ("FULL", 0),
        ("SWA", 1),
        ("MAMBA", 2),
    ]


def test_a_backup_is_compared_by_value() -> None:
    """Tests compare lists of actions; those with tensors have no equality of their own."""
    backup = actions.BackupKV(node_ids=(NodeId(1), NodeId(2)))
    assert backup == actions.BackupKV(node_ids=(NodeId(1), NodeId(2)))
    assert backup != actions.BackupKV(node_ids=(NodeId(2), NodeId(1)))


VALUES = [
    kind
    for module in (radixlink_contracts, actions)
    for kind in vars(module).values()
    if isinstance(kind, type) and attrs.has(kind)
]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_every_value_is_frozen(kind: type[attrs.AttrsInstance]) -> None:
    blank = kind.__new__(kind)
    for field in attrs.fields(kind):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(blank, field.name, None)
