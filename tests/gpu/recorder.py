"""Pytest plugin of run.py: leaves out what another shard runs or what passed, and journals what is run."""

import json
import os
import zlib
from pathlib import Path

import pytest

PLAN = "TRITILE_GPU_PLAN"  # names the file in which run.py says what to run


def shard_of(test: str, shards: int) -> int:
    """The shard, from 1 on, that runs a test."""
    return zlib.crc32(test.encode()) % shards + 1


class Recorder:
    """Journals a line for each file that is collected, and for each test as it ends."""

    def __init__(self, plan: dict, worker: str) -> None:
        self.plan, self.worker = plan, worker
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def _write(self, lines: list[dict]) -> None:
        with Path(self.plan["journal"]).open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(self.plan['stack'] | line)}\n" for line in lines)

    def _named(self, test: str) -> dict:
        name = test.partition("::")[0].rpartition("/")[2]
        return {"file": name, "key": self.plan["keys"].get(name, "")}

    @pytest.hookimpl(tryfirst=True)  # before tests that -m leaves out are gone
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Count the tests of each file, and keep those of this shard that have not passed."""
        if self.worker in ("", "gw0"):
            counts: dict[str, int] = {}
            for item in items:
                counts[item.nodeid.partition("::")[0]] = counts.get(item.nodeid.partition("::")[0], 0) + 1
            self._write([self._named(file) | {"tests": count} for file, count in counts.items()])
        number, shards = self.plan["shard"]
        done = set(self.plan["done"])
        kept = [i for i in items if i.nodeid not in done and shard_of(i.nodeid, shards) == number]
        if len(kept) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
            items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the worst of a test's phases, and write it after the last; a crash has no other."""
        if self.worker:
            return
        test = report.nodeid
        self.seconds[test] = self.seconds.get(test, 0.0) + report.duration
        if report.failed or report.skipped:
            self.outcomes.setdefault(test, report.outcome)
            if report.failed:
                self.outcomes[test] = "failed"
        if report.when not in ("setup", "call"):
            outcome = self.outcomes.pop(test, "passed")
            said = {"test": test, "outcome": outcome, "seconds": round(self.seconds.pop(test), 2)}
            self._write([self._named(test) | said])


def pytest_configure(config: pytest.Config) -> None:
    """Register where run.py left a plan."""
    if os.environ.get(PLAN):
        worker = getattr(config, "workerinput", {}).get("workerid", "")  # "" where xdist hands tests out
        plan = json.loads(Path(os.environ[PLAN]).read_text(encoding="utf-8"))
        config.pluginmanager.register(Recorder(plan, worker), "recorder")
