from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink import main
from radixlink._stores import known_stores, store_factory
from radixlink.errors import StoreError
from radixlink_contracts import StoreConfig

if TYPE_CHECKING:
    from pathlib import Path

    from radixlink.demo import DemoOptions


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report and the models are in the test's own directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refuse_to_launch(*_: object) -> None:
    pytest.fail("a process was started")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "told"),
    [
        (["--store", "tape"], 7, "--store tape: expected one of"),
        (["--store-dir", "file"], 7, "--store-dir file: expected a directory"),
        (["--report", "file/report"], 11, "--report file/report: cannot be written"),
        (["--report", "."], 11, "--report .: cannot be written"),
        (["--tokens", "20000"], 2, "--tokens 20000: the longest conversation would have"),
        (["--turns", "400"], 2, "takes at most 32768"),
        (["--turns", "1000000000000"], 2, "takes at most 32768"),
        (["--tokens", "1" + 20 * "0"], 2, "takes at most 32768"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_launched(
    arguments: list[str],
    exit_code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixlink.demo._processes.Processes.start", refuse_to_launch)
    (tmp_path / "file").write_text("no directory")
    assert main(["demo", "--model", "tiny", *arguments]) == exit_code
    printed = capsys.readouterr().err
    assert told in printed
    assert "Traceback" not in printed


def test_probing_the_report_changes_nothing(tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.json"
    assert main(["demo", "--model", "missing", "--report", str(report)]) == 3
    assert not report.exists()
    report.write_text("of an earlier run")
    assert main(["demo", "--model", "missing", "--report", str(report)]) == 3
    assert report.read_text() == "of an earlier run"


def test_what_the_system_refuses_is_a_message_and_no_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert main(["demo", "--model", "tiny"]) == 10
    printed = capsys.readouterr().err
    assert str(tmp_path / "missing") in printed
    assert "Traceback" not in printed


def test_a_model_that_is_not_there_ends_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    assert main(["demo", "--model", str(missing)]) == 3
    told = capsys.readouterr().err
    assert str(missing) in told
    assert "smollm2" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sing"],
        ["demo", "--turns", "1"],
        ["demo", "--x"],
        ["demo", "--store-dir", ""],
        ["demo", "--report", ""],
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("option", ["--turns", "--tokens"])
@pytest.mark.parametrize("typed", ["abc", "1", "2.5", ""])
def test_a_number_that_is_none_is_told_with_what_is_expected(
    option: str, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", option, typed])
    told = capsys.readouterr().err
    assert f"argument {option}: expected a whole number of 2 or more, got " in told
    assert typed in told


def test_the_location_of_a_store_is_passed_on_as_it_was_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[DemoOptions] = []

    def run_demo(options: DemoOptions) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("radixlink.demo.run_demo", run_demo)
    assert main(["demo", "--store", "redis", "--store-dir", "redis://host:1/0"]) == 0
    assert asked[0].store_dir == "redis://host:1/0"


def test_a_store_that_is_not_installed_names_those_that_are() -> None:
    with pytest.raises(StoreError, match=r"--store tape: .*'file'"):
        store_factory("tape", StoreConfig())
    assert "file" in known_stores()
