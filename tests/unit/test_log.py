"""What is logged of plans, compiles and measurements, by Python's logging, and by TRITILE_LOG."""

import io
import logging
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.configs import tile
from tritile.choose import pick
from tritile.core import log
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import SettingWarning, TuningError
from tritile.families import launching
from tritile.families.matmul_tile.kernel import matmul_tile
from tritile.ops import request as ops_request
from tritile.ops.products import matmul_call
from tritile.runtime import compiles
from tritile.tuner.decorated import TunableKernel
from tritile.tuner.measure import engine, workers
from tritile.tuner.measure.benchmark import ScreenResult
from tritile.tuner.measure.timing import Timing
from tritile.tuner.search import Listed

HOPPER = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 256, 192, 128, "bfloat16", "bfloat16")


@triton.jit
def add_one(x_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < N) + 1, mask=at < N)


@pytest.fixture
def records(caplog, monkeypatch):
    """What is logged while the test runs, at any level."""
    caplog.set_level("DEBUG", "tritile")
    monkeypatch.setattr(compiles, "_listening", False)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    pick.forget()
    found, handler = [], logging.Handler()
    handler.emit = found.append
    monkeypatch.setattr(logging.getLogger("tritile"), "handlers", [handler])
    return found


def facts(record):
    """The name of a record's logger, its level, and the fields that are known."""
    known = {name: value for name in log.FIELDS if (value := getattr(record, name)) is not None}
    return record.name.removeprefix("tritile."), record.levelname, known


# --- The function ---


def test_message_and_record_fields(records):
    log.log("plan", logging.INFO, problem="a b", config="x", us=12.3456, failure='no\n"room"', source=None)
    (record,) = records
    assert record.getMessage() == r'problem="a b" config=x us=12.346 failure="no\n\"room\""'
    assert record.us == 12.3456
    assert record.source is record.kernel is None
    assert record.filename == "test_log.py", "where it was logged, not where it was made"
    assert re.match("None 12.3456", logging.Formatter("%(device)s %(us)s").format(record))


def test_silent_below_level_and_traced(records, caplog):
    def function(x):
        log.log("plan", logging.INFO, problem="p")
        return x + 1

    torch.compile(function, fullgraph=True, backend="eager")(torch.ones(2))
    assert records == []
    caplog.set_level("WARNING", "tritile.plan")
    function(torch.ones(2))
    assert records == []
    caplog.set_level("INFO", "tritile.plan")
    function(torch.ones(2))
    assert [record.problem for record in records] == ["p"]


# --- Plans ---


def test_plan_logged_once(records):
    plan = pick.plan_for(PROBLEM, HOPPER)
    pick.plan_for(PROBLEM, HOPPER)
    (record,) = records
    known = {"problem": PROBLEM.label, "config": str(plan.config), "source": plan.source, "us": plan.us}
    assert facts(record) == ("plan", "INFO", known | {"device": HOPPER.name, "seconds": record.seconds})
    assert record.seconds > 0
    with tritile.mode("off"):
        pick.plan_for(PROBLEM, HOPPER)
    assert [each.source for each in records[1:]] == ["model"]


# --- Measurements ---


class Runner:
    """Compiles one config and refuses all others; the answer of that one is right."""

    max_resident = 1

    def __init__(self, good):
        self.good = good

    def compile(self, tunable, config, for_check=False):
        compiled = Future()
        if config == self.good:
            compiled.set_result(None)
        else:
            compiled.set_exception(workers.WorkerError("no room"))
        return compiled

    def begin(self, tunable):
        pass

    end = begin

    def screen(self, tunable, config, fastest_us):
        return ScreenResult(Timing(2.5, 0.0), None)

    def check(self, tunable, config):
        return 0.0


def test_failed_measurement_says_why(records):
    bad, good, reported = tile(16, 16, 16), tile(32, 32, 32), []
    tasks = [engine.TuningTask(TunableKernel(PROBLEM, HOPPER, "digest"), Listed([bad, good]))]
    outcomes = engine.tune(tasks, Runner(good), engine.Rules(), lambda digest, trial: reported.append(trial))
    assert [outcome.best.error for outcome in outcomes] == [0.0]
    shared = {"problem": PROBLEM.label}
    assert [facts(record) for record in records] == [
        ("tune", "DEBUG", shared | {"config": str(bad), "failure": "no room"}),
        ("tune", "DEBUG", shared | {"config": str(good), "us": 2.5}),
    ]
    assert [trial.error for trial in reported] == [None, None, 0.0], "and not again as it is checked"


# --- Compiles ---


def test_compile_logged_with_source(records, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = tile(16, 16, 16)
    for _ in range(2):
        launching.compiled_for(PROBLEM, config, HOPPER)
        matmul_tile.device_caches.clear()  # what Triton keeps in memory
    compiled, found = map(facts, records)
    known = {"kernel": "matmul_tile", "problem": PROBLEM.label, "config": str(config)}
    for (about, level, fields), source in ((compiled, "compiled"), (found, "cache")):
        assert (about, level) == ("compile", "INFO")
        assert fields == known | {"source": source, "seconds": fields["seconds"]}
    assert compiled[2]["seconds"] > found[2]["seconds"] > 0


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_triton_listener_while_logging(level, caplog, monkeypatch):
    caplog.set_level(level, "tritile")
    monkeypatch.setattr(compiles, "_listening", False)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    with compiles.log_compiles_as("problem", "config"):
        assert (triton.knobs.compilation.listener is not None) == (level == "INFO")


def test_decorated_compiles_logged(records):
    metadata = {"num_warps": 2, "num_stages": 3}
    source = SimpleNamespace(fn=add_one, constants={(2,): 64})
    compiled = {"metadata": metadata, "times": SimpleNamespace(total=25_000), "cache_hit": True}
    compiles._heard(src=source, **compiled)
    compiles._heard(src=SimpleNamespace(), **compiled)  # no Python source
    assert records == []
    tritile.autotune([triton.Config({"BLOCK": 64})], [])(add_one)
    compiles._heard(src=source, **compiled)
    known = {"kernel": "add_one", "config": "BLOCK=64 num_warps=2 num_stages=3", "source": "cache"}
    assert [facts(record) for record in records] == [("compile", "INFO", known | {"seconds": 0.025})]


def test_user_listener_keeps_hearing(records, monkeypatch):
    heard, compiled = [], {"src": SimpleNamespace(), "metadata": {}, "times": SimpleNamespace(total=5e5)}
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **given: heard.append(given["cache_hit"])
    )
    compiles.listen()
    triton.knobs.compilation.listener(**compiled, cache_hit=True)
    assert heard == [True]


def test_failed_compile_warns(records, monkeypatch):
    def prepare(call, config):
        if len(records) < 2:
            raise TuningError("too large")
        return config

    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(launching, "prepare", prepare)
    a, b, out = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(3))
    ops_request.prepared(matmul_call(a, b, out, "ieee"))
    plan, failed = records
    known = {"problem": plan.problem, "config": plan.config, "device": HOPPER.name, "failure": "too large"}
    assert facts(failed) == ("compile", "WARNING", known)


# --- TRITILE_LOG ---


@pytest.fixture
def logger(monkeypatch):
    """The logger "tritile" without what the test gives it."""
    logger, level = logging.getLogger("tritile"), logging.getLogger("tritile").level
    monkeypatch.setattr(logger, "handlers", [])
    yield logger
    logger.setLevel(level)


@pytest.mark.parametrize("root_has_one", [False, True])
def test_root_handler_replaces_ours(root_has_one, logger, monkeypatch):
    ours, roots = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", ours)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("TRITILE_LOG", "info")
    log.set_up()
    handlers = [logging.StreamHandler(roots)] if root_has_one else []
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)  # set up after tritile was imported
    log.log("plan", logging.INFO, source="model")
    log.log("tune", logging.DEBUG, source="model")
    logged = roots if root_has_one else ours
    assert logged.getvalue().count("source=model") == 1
    assert ours.getvalue() + roots.getvalue() == logged.getvalue()


def test_unknown_level_warns(logger, monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", "plan")
    expected = "TRITILE_LOG is 'plan': expected one of debug, info, warning, error"
    with pytest.warns(SettingWarning, match=expected):
        log.set_up()
    monkeypatch.delenv("TRITILE_LOG")
    log.set_up()
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


def test_worker_processes_log_nothing(monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", "debug")
    monkeypatch.setenv("TRITILE_MODE", "off")
    with workers.WorkerPool(compilers=1) as pool:
        environment = pool.submit(eval, "dict(__import__('os').environ)").result()
    assert "TRITILE_LOG" not in environment
    assert environment["TRITILE_MODE"] == "off"


def test_the_page_has_every_field():
    page = (Path(tritile.__file__).parents[1] / "docs" / "observability.md").read_text()
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == list(log.FIELDS)
