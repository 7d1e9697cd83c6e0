"""The same calls give the same answers in every process, whatever its hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "decisions.py"
#: Of page_size=2, tokens 1, 2, 3, 4, in the default namespace; made by hashlib.
KEYS = (
    "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f "
    "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c"
)


def test_keys_answers_actions_digests_and_ids_do_not_depend_on_the_hash_seed() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1]
    keys, _, _, *decisions = outputs[0].splitlines()
    assert keys == KEYS
    # What can happen did happen, and to a tree of each kind under each policy.
    assert (
        sum(line.startswith(("LRU FULL", "PRIORITY FULL", "MRU FULL")) for line in decisions) == 12
    )
    happenings = ("free [", "free full [", "free windows of [", "move windows [", "free states (")
    for words in (*happenings, "offload (", "mamba_locked=True", "device_prefix_len=8"):
        assert any(words in line for line in decisions), words
