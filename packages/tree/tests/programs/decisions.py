"""Print every decision of a seeded workload: to be run under several PYTHONHASHSEED."""

# ruff: noqa: T201 -- a script

from __future__ import annotations

import random
from array import array

import torch

from radixlink_contracts import (
    EvictParams,
    IncLockRefParams,
    InsertParams,
    MatchPrefixParams,
    Namespace,
    OperationId,
    RadixKey,
)
from radixlink_contracts.actions import BackupKV, FreeDeviceKV
from radixlink_tree import UnifiedTreeCore

PAGE_SIZE = 2
NAMESPACES = (Namespace(), Namespace(extra_key="adapter"), Namespace(cache_salt="tenant"))


def main() -> None:
    """Print the keys of a fixed sequence in each namespace, then what each of 400 calls decided."""
    tree = UnifiedTreeCore(page_size=PAGE_SIZE)
    tree.attach_linker(backup_threshold=2)
    for namespace in NAMESPACES:
        key = RadixKey(array("q", [1, 2, 3, 4]), namespace)
        print(*tree.key_source(tree.root, key, 0).resolve().hex())
    dice = random.Random(7)
    receipts = []
    next_slot = 0
    operations: list[OperationId] = []
    for number in range(400):
        pages = [dice.randrange(3) for _ in range(dice.randrange(1, 8))]
        tokens = array("q", [token for page in pages for token in (page, page)])
        key = RadixKey(tokens, dice.choice(NAMESPACES))
        call = dice.randrange(5)
        if call == 0:
            found = tree.match(MatchPrefixParams(key=key))
            print(found.device_prefix_len, found.last_device_node)
            receipts.append(tree.inc_lock_ref(IncLockRefParams(node_id=found.last_device_node)))
        elif call == 1 and receipts:
            tree.dec_lock_ref(receipts.pop(dice.randrange(len(receipts))).to_dec_params())
        elif call == 2:
            evicted = tree.evict(EvictParams(num_tokens=2 * dice.randrange(1, 6)))
            print(evicted.num_tokens_evicted)
            for action in evicted.cache_actions:
                assert isinstance(action, FreeDeviceKV)
                print(action.indices.tolist())
        elif call == 3 and operations:
            tree.finish_offload(operations.pop(0), stored=dice.random() < 0.7)
        else:
            value = torch.arange(next_slot, next_slot + len(tokens))
            next_slot += len(tokens)
            inserted = tree.insert(InsertParams(key=key, value=value))
            print(inserted.prefix_len, inserted.last_device_node)
            for action in inserted.cache_actions:
                if isinstance(action, BackupKV):
                    print(action.node_ids)
                    for node_id in action.node_ids:
                        operations.append(OperationId(number * 100 + node_id))
                        tree.mark_offload_pending(node_id, operations[-1])
        print(tree.mutation_digest, tree.evictable_size, tree.protected_size)


if __name__ == "__main__":
    main()
