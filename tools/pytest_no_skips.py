"""A pytest plugin: under RADIXLINK_CI, a skipped test fails the run, and the reasons are listed.

Where everything that tests need is installed, a skip means that something is not tested at all.
"""

from __future__ import annotations

import os

import pytest


class NoSkips:
    """Collects skips, of single tests and of whole modules."""

    def __init__(self) -> None:
        self.skips: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a skipped test; an expected failure (xfail) reports as skipped too, but is none."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that skipped itself."""
        if report.skipped:
            self._note(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn a run that would have passed into a failed one."""
        passed = session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
        if self.skips and passed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List what was skipped, and why."""
        if self.skips:
            terminalreporter.section("skipped, which RADIXLINK_CI does not allow", red=True)
            for skip in self.skips:
                terminalreporter.line(skip)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        self.skips.append(f"{report.nodeid}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    """Watch for skips only where RADIXLINK_CI asks for it."""
    if os.environ.get("RADIXLINK_CI") == "1":
        config.pluginmanager.register(NoSkips(), "radixlink-no-skips")
