from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink.demo._messages import TurnFigures
from radixlink.demo._report import (
    MAX_DLOGIT,
    MIN_SPEED_UP,
    DemoReport,
    RanksFailed,
    RanksLeftOut,
    RanksReport,
    TurnReport,
    ranks_report,
)
from radixlink.errors import ReportError

if TYPE_CHECKING:
    from pathlib import Path

    from radixlink.demo._report import Ranks

GOOD_FIGURES = TurnFigures(
    prompt_tokens=100,
    device_tokens=0,
    restored_tokens=96,
    computed_tokens=4,
    first_token_s=0.1,
    load_s=0.05,
    without_store_s=0.9,
    tokens=(1, 2),
    identical=True,
    dlogit=1e-6,
    control_dlogit=0.5,
    pages_by_writer={7: 6},
)
GOOD_RANKS = RanksReport(
    restored_tokens=(96, 96),
    computed_tokens_after_loss=(100, 100),
    restored_tokens_after_loss=(0, 0),
    identical=True,
    max_dlogit=1e-6,
)


def turn(number: int, figures: TurnFigures) -> TurnReport:
    return TurnReport(
        number=number, conversation="text", replica="A", pid=5, answer=" yes", figures=figures
    )


def report(*figures: TurnFigures, ranks: Ranks = GOOD_RANKS) -> DemoReport:
    return DemoReport(
        model="tiny",
        model_digest="d",
        store="file",
        turns=tuple(turn(number + 1, some) for number, some in enumerate(figures)),
        ended_pid=6,
        survivor_end=None,
        ranks=ranks,
        seconds=1.0,
    )


def test_a_run_in_which_all_is_right_has_no_fault() -> None:
    assert report(GOOD_FIGURES, GOOD_FIGURES).faults() == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (attrs.evolve(GOOD_FIGURES, identical=False), "turn 2 of text: tokens differ"),
        (
            attrs.evolve(GOOD_FIGURES, restored_tokens=0, control_dlogit=None),
            "turn 2 of text: nothing was restored",
        ),
        (attrs.evolve(GOOD_FIGURES, dlogit=2 * MAX_DLOGIT), "logits are off"),
        (attrs.evolve(GOOD_FIGURES, dlogit=math.nan), "logits are off by nan"),
        (attrs.evolve(GOOD_FIGURES, control_dlogit=MAX_DLOGIT / 2), "does not see a swapped page"),
        (attrs.evolve(GOOD_FIGURES, control_dlogit=math.nan), "does not see a swapped page"),
        (
            attrs.evolve(GOOD_FIGURES, control_dlogit=None),
            "turn 2 of text: restored without a control",
        ),
    ],
)
def test_each_wrong_figure_of_a_turn_is_one_fault(wrong: TurnFigures, told: str) -> None:
    (fault,) = report(GOOD_FIGURES, wrong).faults()
    assert told in fault


def test_the_first_turn_need_not_restore() -> None:
    first = attrs.evolve(GOOD_FIGURES, restored_tokens=0, control_dlogit=None)
    assert report(first, GOOD_FIGURES).faults() == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (attrs.evolve(GOOD_RANKS, identical=False), "tokens differ"),
        (attrs.evolve(GOOD_RANKS, max_dlogit=1.0), "logits are off"),
        (attrs.evolve(GOOD_RANKS, max_dlogit=math.nan), "logits are off by nan"),
        (attrs.evolve(GOOD_RANKS, restored_tokens=(96, 80)), "restored (96, 80)"),
        (attrs.evolve(GOOD_RANKS, restored_tokens=(0, 0)), "restored (0, 0)"),
        (
            attrs.evolve(GOOD_RANKS, computed_tokens_after_loss=(100, 4)),
            "did not cost both the same recompute",
        ),
        (
            attrs.evolve(GOOD_RANKS, restored_tokens_after_loss=(96, 96)),
            "did not cost both the same recompute",
        ),
    ],
)
def test_each_wrong_figure_of_the_ranks_is_one_fault(wrong: RanksReport, told: str) -> None:
    (fault,) = report(GOOD_FIGURES, ranks=wrong).faults()
    assert told in fault


def test_ranks_that_failed_are_a_fault_and_ranks_that_were_left_out_are_none() -> None:
    failed = report(GOOD_FIGURES, ranks=RanksFailed(failure="mpirun ended with exit code 3"))
    assert failed.faults() == ["two ranks: mpirun ended with exit code 3"]
    assert failed.identical
    assert failed.max_dlogit == GOOD_FIGURES.dlogit
    left_out = report(GOOD_FIGURES, ranks=RanksLeftOut(why_left_out="no mpirun"))
    assert left_out.faults() == []
    assert left_out.summary()[-1].endswith("left out: no mpirun")


def test_a_replica_that_did_not_end_well_is_a_fault() -> None:
    held = attrs.evolve(report(GOOD_FIGURES), survivor_end="replica A ended with exit code -11")
    (fault,) = held.faults()
    assert "replica A ended with exit code -11" in fault


def test_speed_up_is_the_median_of_the_turns_that_restored() -> None:
    fast = attrs.evolve(GOOD_FIGURES, first_token_s=0.1, without_store_s=2.0)
    slow = attrs.evolve(GOOD_FIGURES, first_token_s=0.1, without_store_s=0.5)
    nothing = attrs.evolve(GOOD_FIGURES, restored_tokens=0, control_dlogit=None)
    assert report(nothing, fast, GOOD_FIGURES, slow).median_speed_up == pytest.approx(9.0)
    assert report(nothing).median_speed_up == 0.0


def test_distances_of_the_ranks_count_and_nothing_hides_one_that_is_unknown() -> None:
    far = attrs.evolve(GOOD_RANKS, max_dlogit=0.25)
    assert report(GOOD_FIGURES, ranks=far).max_dlogit == 0.25
    unknown = attrs.evolve(GOOD_FIGURES, dlogit=math.nan, control_dlogit=math.nan)
    for figures in ((unknown, GOOD_FIGURES), (GOOD_FIGURES, unknown)):
        held = report(*figures)
        assert math.isnan(held.max_dlogit)
        assert held.control_dlogit is not None
        assert math.isnan(held.control_dlogit)


def test_a_first_token_that_is_not_much_sooner_is_a_fault_but_for_the_tiny_model() -> None:
    slow = attrs.evolve(GOOD_FIGURES, first_token_s=0.1, without_store_s=0.1 * MIN_SPEED_UP * 0.9)
    held = report(slow, slow)
    assert held.faults() == []
    (fault,) = attrs.evolve(held, model="smollm2").faults()
    assert "first token only 3.6 times sooner" in fault
    assert attrs.evolve(report(GOOD_FIGURES, GOOD_FIGURES), model="smollm2").faults() == []


def test_the_summary_tells_what_the_last_turns_had_of_the_killed_replica() -> None:
    first = attrs.evolve(GOOD_FIGURES, pages_by_writer={6: 100})
    last = attrs.evolve(GOOD_FIGURES, pages_by_writer={6: 2, 7: 4})
    assert (
        "pid 6 was killed before the last turns: 2 of the 6 pages"
        in report(first, last).summary()[2]
    )
    assert "0 of the 6 pages" in report(first, GOOD_FIGURES).summary()[2]


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ReportError, match=r"--report .*cannot be written"):
        report(GOOD_FIGURES).write(tmp_path / "file" / "report.json")


def test_the_report_is_written_with_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report(GOOD_FIGURES, GOOD_FIGURES).write(path)
    written = json.loads(path.read_text())
    assert written["identical"] is True
    assert written["max_dlogit"] == GOOD_FIGURES.dlogit
    assert written["control_dlogit"] == GOOD_FIGURES.control_dlogit
    assert written["turns"][1]["figures"]["restored_tokens"] == 96
    assert written["turns"][0]["figures"]["pages_by_writer"] == {"7": 6}
    assert written["ranks"]["restored_tokens"] == [96, 96]


def no_json(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


def test_a_report_with_figures_that_are_no_numbers_is_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    wrong = attrs.evolve(GOOD_FIGURES, dlogit=math.nan, control_dlogit=math.inf)
    report(wrong).write(path)
    written = json.loads(path.read_text(), parse_constant=no_json)
    assert written["max_dlogit"] == "nan"
    assert written["turns"][0]["figures"]["control_dlogit"] == "inf"


def test_ranks_are_reported_by_rank_and_wrong_if_one_is() -> None:
    told: list[dict[str, object]] = [
        {
            "restored_tokens": 96 + rank,
            "restored_tokens_after_loss": 0,
            "computed_tokens_after_loss": 100,
            "identical": rank == 0,
            "max_dlogit": rank * 0.5,
        }
        for rank in range(2)
    ]
    found = ranks_report(told)
    assert found.restored_tokens == (96, 97)
    assert not found.identical
    assert found.max_dlogit == 0.5
