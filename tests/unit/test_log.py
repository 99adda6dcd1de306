"""What is logged of plans, compiles and measurements, by Python's logging, and by TRITILE_LOG."""

import io
import logging
import multiprocessing
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.configs import tile
from tritile.core import log
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import SettingWarning, TuningError
from tritile.ops import memo
from tritile.ops import request as ops_request
from tritile.planning import plans
from tritile.planning.trial import Trial
from tritile.runtime import ahead, compiles, launch
from tritile.tune.measure import engine, workers

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
    plans.forget()
    found, handler = [], logging.Handler()
    handler.emit = found.append
    monkeypatch.setattr(logging.getLogger("tritile"), "handlers", [handler])
    return found


@pytest.fixture
def on_hopper(monkeypatch):
    """Take host tensors for an H200's: calls are planned for it, and launch nothing."""
    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(memo, "new_output", lambda shape, *rest: torch.empty(shape))
    tritile.forget()
    yield
    tritile.forget()


class Launch:
    def __call__(self, *tensors):
        """Stand for a first launch."""

    def at(self, pointers):
        """Stand for a warm launch."""


def facts(record):
    """The name of a record's logger, its level, and the fields that are known."""
    known = {name: value for name in log.FIELDS if (value := getattr(record, name)) is not None}
    return record.name.removeprefix("tritile."), record.levelname, known


# --- The function ---


def test_a_message_has_what_is_known_and_a_record_every_field(records):
    log.log("plan", logging.INFO, problem="a b", config="x", us=12.3456, failure='no\n"room"', source=None)
    (record,) = records
    assert record.getMessage() == r'problem="a b" config=x us=12.346 failure="no\n\"room\""'
    assert record.us == 12.3456
    assert record.source is record.kernel is None
    assert record.filename == "test_log.py", "where it was logged, not where it was made"
    assert re.match("None 12.3456", logging.Formatter("%(device)s %(us)s").format(record))


def test_nothing_is_logged_below_the_level_and_in_code_that_is_traced(records, caplog):
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


def test_a_plan_is_logged_once_where_it_is_made(records):
    plan = plans.plan_for(PROBLEM, HOPPER)
    plans.plan_for(PROBLEM, HOPPER)
    (record,) = records
    known = {"problem": PROBLEM.label, "config": str(plan.config), "source": plan.source, "us": plan.us}
    assert facts(record) == ("plan", "INFO", known | {"device": HOPPER.name, "seconds": record.seconds})
    assert record.seconds > 0
    with tritile.mode("off"):
        plans.plan_for(PROBLEM, HOPPER)
    assert [each.source for each in records[1:]] == ["model"]


def test_a_warm_call_does_not_even_ask_whether_to_log(records, on_hopper, monkeypatch):
    monkeypatch.setattr(launch, "prepare", lambda call, config: Launch())
    a, b = torch.empty(256, 128), torch.empty(128, 192)
    out = torch.empty(256, 192)
    for _ in range(2):  # prepared, then recalled
        tritile.matmul(a, b, precision="tf32")
        tritile.matmul(a, b, precision="tf32", out=out)
    assert [record.name for record in records] == ["tritile.plan"]
    asked_of = []
    monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda logger, level: asked_of.append(logger.name))
    for _ in range(100):
        tritile.matmul(a, b, precision="tf32")
        tritile.matmul(a, b, precision="tf32", out=out)
    assert asked_of == []
    tritile.forget()
    tritile.matmul(a, b, precision="tf32")
    assert "tritile.plan" in asked_of, "a plan that is made anew is logged: the list above can fill"


# --- Measurements ---


def test_a_measurement_says_why_it_failed_and_a_check_of_it_nothing_more(records):
    kept = []
    keep = engine.logged(lambda digest, trial: kept.append(trial))
    trial = Trial(PROBLEM, tile(16, 16, 16), None, failure="no room")
    keep("digest", trial)
    keep("digest", trial)
    (record,) = records
    known = {"problem": PROBLEM.label, "config": str(trial.config), "failure": "no room"}
    assert facts(record) == ("tune", "DEBUG", known)
    assert kept == [trial, trial]


# --- Compiles ---


def test_a_compile_is_logged_with_its_problem_and_whence_it_came(records, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = tile(16, 16, 16)
    for _ in range(2):
        ahead.compiled_for(PROBLEM, config, HOPPER)
        _jitted().device_caches.clear()  # what Triton keeps in memory
    compiled, found = map(facts, records)
    known = {"kernel": "matmul_tile", "problem": PROBLEM.label, "config": str(config)}
    for (about, level, fields), source in ((compiled, "compiled"), (found, "cache")):
        assert (about, level) == ("compile", "INFO")
        assert fields == known | {"source": source, "seconds": fields["seconds"]}
    assert compiled[2]["seconds"] > found[2]["seconds"] > 0


def test_triton_has_no_listener_where_nobody_logs(caplog, monkeypatch):
    caplog.set_level("WARNING", "tritile")
    monkeypatch.setattr(compiles, "_listening", False)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    with compiles.asking("problem", "config"):
        assert triton.knobs.compilation.listener is None
    caplog.set_level("INFO", "tritile")
    with compiles.asking("problem", "config"):
        assert triton.knobs.compilation.listener is not None


def _jitted():
    from tritile.families.matmul_tile.kernel import matmul_tile

    return matmul_tile


def compile_of(function, hit=False):
    """Have Triton's listener called with a compile of a jitted function."""
    source = SimpleNamespace(fn=function, constants={(2,): 64})
    metadata = {"num_warps": 2, "num_stages": 3}
    compiles._heard(src=source, metadata=metadata, times=SimpleNamespace(total=25_000), cache_hit=hit)


def test_compiles_of_decorated_kernels_are_logged_and_no_strangers(records):
    @triton.jit
    def stranger(x_ptr, N, BLOCK: tl.constexpr):
        tl.store(x_ptr, N + BLOCK)

    compile_of(stranger)
    compiles._heard(src=SimpleNamespace(), metadata={}, times=None, cache_hit=False)  # no Python source
    assert records == []
    tritile.autotune([triton.Config({"BLOCK": 64})], [])(stranger)
    compile_of(stranger, hit=True)
    known = {"kernel": "stranger", "config": "BLOCK=64 num_warps=2 num_stages=3", "source": "cache"}
    assert [facts(record) for record in records] == [("compile", "INFO", known | {"seconds": 0.025})]


def test_a_listener_of_the_users_own_goes_on_hearing(records, monkeypatch):
    heard = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **given: heard.append(given["cache_hit"])
    )
    compiles.listen()
    compiled = {"src": SimpleNamespace(), "metadata": {}, "times": SimpleNamespace(total=5e5)}
    triton.knobs.compilation.listener(**compiled, cache_hit=True)
    with compiles.compiles_heard() as seconds:
        triton.knobs.compilation.listener(**compiled, cache_hit=False)
    assert heard == [True, False]
    assert seconds == [0.5]


def test_a_config_that_does_not_compile_is_a_warning(records, on_hopper, monkeypatch):
    def prepare(call, config):
        if len(records) < 2:
            raise TuningError("too large")
        return Launch()

    monkeypatch.setattr(launch, "prepare", prepare)
    tritile.matmul(torch.empty(256, 128), torch.empty(128, 192), precision="tf32")
    plan, failed = records
    known = {"problem": plan.problem, "config": plan.config, "device": HOPPER.name, "failure": "too large"}
    assert facts(failed) == ("compile", "WARNING", known)


# --- TRITILE_LOG ---


@pytest.fixture
def logger(monkeypatch):
    """The logger "tritile" without what the test gives it."""
    logger = logging.getLogger("tritile")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    yield logger
    logger.setLevel(level)


@pytest.mark.parametrize("root_has_one", [False, True])
def test_a_handler_of_the_root_takes_the_place_of_ours(root_has_one, logger, monkeypatch):
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


def test_a_word_that_is_no_level_is_warned_of(logger, monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", "plan")
    with pytest.warns(
        SettingWarning, match="TRITILE_LOG is 'plan': expected one of debug, info, warning, error"
    ):
        log.set_up()
    assert logger.handlers == []
    monkeypatch.delenv("TRITILE_LOG")
    log.set_up()
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


def test_processes_whose_last_lines_are_read_log_nothing(monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", "debug")
    monkeypatch.setenv("TRITILE_MODE", "off")
    given = []
    monkeypatch.setattr(workers.subprocess, "Popen", lambda command, **how: given.append(how["env"]))
    with multiprocessing.Pipe()[1] as theirs:
        workers.Workers()._started(theirs)
    (environment,) = given
    assert "TRITILE_LOG" not in environment
    assert environment["TRITILE_MODE"] == "off"


def test_the_page_has_every_field():
    page = (Path(tritile.__file__).parents[1] / "docs" / "observability.md").read_text()
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == list(log.FIELDS)
