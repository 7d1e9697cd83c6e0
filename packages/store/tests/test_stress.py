"""Several processes that put and read at once, in a store that holds an eighth of their pages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from packages.store.tests.conftest import STRESS

from radixlink_store.maintenance import Verdict, verify

MIXED = Path(__file__).parent / "programs" / "mixed.py"
CAPACITY = 128 * 16384
#: All together, in each of the six runs; a million in all.
READS = 200_000 if STRESS else 4_000
TIMEOUT_S = 600.0


@pytest.mark.timeout(700 if STRESS else 60)
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("processes", [2, 4, 8] if STRESS else [2])
def test_no_process_ever_reads_a_wrong_byte(
    tmp_path: Path, processes: int, *, checksums: bool
) -> None:
    command = [sys.executable, str(MIXED), str(tmp_path), str(CAPACITY), str(int(checksums))]
    started = [
        subprocess.Popen(
            [*command, str(READS // processes), str(seed)], stdout=subprocess.PIPE, text=True
        )
        for seed in range(processes)
    ]
    total = Counter[str]()
    try:
        for process in started:
            told, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0
            total.update(json.loads(told))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    asked = total["right"] + total["wrong"] + total["stale"] + total["corrupt"]
    sys.stdout.write(
        f"{processes} processes, checksums {'on' if checksums else 'off'}: {total['right']:,} reads"
        f" right, {total['wrong']} wrong, {total['stale'] / asked:.1%} rejected as stale\n"
    )
    assert total["right"] >= READS - processes
    assert total["wrong"] == 0
    assert total["corrupt"] == 0
    # Otherwise the check was not exercised.
    assert total["stale"] > 0
    (verdict,) = verify(tmp_path)
    assert isinstance(verdict, Verdict)
    assert verdict.damages == ()
    assert verdict.num_pages > 100
