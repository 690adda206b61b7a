"""Where the processor time of the tests goes: PYTHONPATH=bench/speed pytest -p suite_times.

A plug-in of pytest that prints the functions that took longest. Times are processor seconds of a test and of the
processes that it waited for. A neighbour on the machine changes them, so their sum is also divided by the time of work
that is always the same, done between the tests.
"""

from __future__ import annotations

import resource
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from budget import pace

SLOWEST = 20
TESTS_PER_PACE = 20
"""Tests between two measures of the pace of the machine, which takes 3 ms."""

BEGAN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times())


def processor_seconds(*who: int) -> float:
    """Of this process, and of the children that it waited for, since it began; of one of them where it is named."""
    usages = map(resource.getrusage, who or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Times:
    """What one process of pytest measures; the one that prints gathers the times of all workers."""

    def __init__(self) -> None:
        self.paces: list[float] = []
        self.tests = 0
        self.seconds = 0.0
        self.functions: Counter[str] = Counter()
        self.items: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin to count."""
        if self.tests % TESTS_PER_PACE == 0:
            self.paces.append(pace())
        self.tests += 1
        item.stash[BEGAN] = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Give the report of a phase the seconds since the phase before it ended."""
        now = processor_seconds()
        report: Any = yield
        report.processor_seconds = now - item.stash[BEGAN]
        item.stash[BEGAN] = now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a phase to its function."""
        name = report.nodeid.partition("[")[0]
        self.functions[name] += report.processor_seconds
        self.items[name] += report.when == "setup"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the times of a worker to the process that prints, whose children are the workers."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(seconds=processor_seconds(), paces=self.paces)
        else:
            self.seconds += processor_seconds() if self.tests else processor_seconds(resource.RUSAGE_SELF)

    def pytest_testnodedown(self, node: Any) -> None:
        """Take the times of a worker."""
        self.seconds += node.workeroutput["seconds"]
        self.paces += node.workeroutput["paces"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        if not self.paces:
            return
        terminalreporter.section(f"{SLOWEST} slowest functions: processor seconds, tests")
        for name, seconds in self.functions.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f} {self.items[name]:5} {name}")
        unit = statistics.mean(self.paces)
        terminalreporter.write_line(
            f"{self.seconds:.0f} s of processor time, {self.seconds / unit:,.0f} times that of the same small work"
        )
