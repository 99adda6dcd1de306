"""What a program is told of plans, compiles and measurements, by a callback and by Python's logging."""

import io
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.configs import tile
from tritile.core import events, settings
from tritile.core.device import target_device
from tritile.core.events import Event
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, SettingWarning, TuningError
from tritile.ops import asked, memo, run
from tritile.planning import plans
from tritile.planning.trial import Trial
from tritile.runtime import ahead, compiles, launch, observing
from tritile.tune import autotuner
from tritile.tune.measure import child, tasks

HOPPER = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 256, 192, 128, "bfloat16", "bfloat16")
PLAN = Event("plan", PROBLEM.label, "tile BLOCK_K=16", "model", "NVIDIA H200", us=12.34, seconds=0.0126)
FAILED = Event("measure", PROBLEM.label, "BLOCK=64 num_warps=4", failure='out of\nresource: "shared"')


@triton.jit
def add_one(x_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < N) + 1, mask=at < N)


@pytest.fixture
def heard():
    """All that is told while the test runs."""
    found = []
    remove = tritile.on_event(found.append)
    plans.forget()
    yield found
    remove()


@pytest.fixture
def on_hopper(monkeypatch):
    """Take host tensors for an H200's: calls are planned for it, and launch nothing."""
    monkeypatch.setattr(asked, "on_host", lambda tensor: False)
    monkeypatch.setattr(run.devices, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(memo, "new_output", lambda shape, *rest: torch.empty(shape))
    tritile.forget()
    yield
    tritile.forget()


class Launch:
    def __call__(self, *tensors):
        """Stand for a first launch."""

    def at(self, pointers):
        """Stand for a warm launch."""


# --- The seam ---


def test_a_callback_gets_what_is_told_until_it_is_removed():
    first, second = [], []
    removals = [events.subscribe(found.append) for found in (first, first, second)]
    events.tell(lambda: PLAN)
    removals[0]()
    removals[0]()
    events.tell(lambda: FAILED)
    for remove in removals:
        remove()
    events.tell(lambda: pytest.fail("made for nobody"))
    assert first == [PLAN, PLAN, FAILED]
    assert second == [PLAN, FAILED]


def test_a_callback_that_raises_is_logged_and_disturbs_nobody(heard, caplog):
    remove = tritile.on_event(lambda event: 1 / 0)
    last = []
    also = tritile.on_event(last.append)
    events.tell(lambda: PLAN)
    remove(), also()
    assert heard == last == [PLAN]
    (record,) = caplog.records
    assert (record.name, record.exc_info[0]) == ("tritile", ZeroDivisionError)


def test_an_event_that_cannot_be_made_is_logged_and_disturbs_nobody(heard, caplog):
    events.tell(lambda: 1 / 0)
    assert heard == []
    assert caplog.messages == ["an event cannot be told"]


def test_what_cannot_be_called_is_refused():
    with pytest.raises(InvalidValueError, match="on_event: callback is None"):
        tritile.on_event(None)


def test_nothing_is_told_in_code_that_is_traced_and_the_graph_is_whole(heard):
    def function(x):
        events.tell(lambda: PLAN)
        return x + 1

    torch.compile(function, fullgraph=True, backend="eager")(torch.ones(2))
    assert heard == []
    function(torch.ones(2))
    assert heard == [PLAN]


def test_threads_come_and_go_while_others_tell(heard):
    def come_and_go():
        for _ in range(200):
            events.subscribe(lambda event: None)()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        events.tell(lambda: PLAN)
    for thread in threads:
        thread.join()
    assert heard == [PLAN] * 200
    assert len(events._subscriptions) == 1


# --- Plans ---


def test_a_plan_is_told_once_where_it_is_made(heard):
    plan = plans.plan_for(PROBLEM, HOPPER)
    plans.plan_for(PROBLEM, HOPPER)
    (event,) = heard
    assert (event.kind, event.problem, event.config) == ("plan", PROBLEM.label, str(plan.config))
    assert (event.source, event.device, event.us) == (plan.source, HOPPER.name, plan.us)
    assert event.seconds > 0
    with tritile.mode("off"):
        plans.plan_for(PROBLEM, HOPPER)
    assert [each.source for each in heard[1:]] == ["model"]


def test_a_warm_call_tells_nothing(heard, on_hopper, monkeypatch):
    monkeypatch.setattr(launch, "prepare", lambda call, config, spare: Launch())
    a, b = torch.empty(256, 128), torch.empty(128, 192)
    out = torch.empty(256, 192)
    for _ in range(2):  # prepared, then recalled
        tritile.matmul(a, b, precision="tf32")
        tritile.matmul(a, b, precision="tf32", out=out)
    assert [event.kind for event in heard] == ["plan"]
    asked_of = []
    for module in (events, plans, run, compiles, autotuner, tasks):
        monkeypatch.setattr(module, "tell", asked_of.append)
    for _ in range(100):
        tritile.matmul(a, b, precision="tf32")
        tritile.matmul(a, b, precision="tf32", out=out)
    assert asked_of == []
    tritile.forget()
    tritile.matmul(a, b, precision="tf32")
    assert len(asked_of) == 1, "a plan that is made anew is told: the count above can fail"


def test_a_decorated_kernels_choice_is_told_once(heard):
    kernel = tritile.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], ["N"])(add_one)
    x = torch.zeros(100)
    for _ in range(3):
        kernel[(2,)](x, 100)
    (event,) = heard
    assert (event.kind, event.source) == ("plan", "model")
    assert event.problem.startswith("add_one")
    assert event.config == "BLOCK=64 num_warps=4 num_stages=3"


# --- Measurements ---


def test_measurements_of_a_decorated_kernel_are_told_then_its_plan(heard):
    def bench(call, quantiles):
        call()
        return [1.0, 1.0, 1.0]

    configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, pre_hook=lambda given: None)]
    configs.append(
        triton.Config({"BLOCK": 64}, num_warps=2, ir_override="none.ttir")
    )  # another program of that name
    kernel = tritile.autotune(configs, ["N"], do_bench=bench, mode="tune")(add_one)
    kernel[(2,)](torch.zeros(100), 100)
    kernel[(2,)](torch.zeros(100), 100)
    measured, plan = heard[:-1], heard[-1]
    assert {event.kind for event in measured} == {"measure"}
    assert {event.config.split()[0] for event in measured} == {"BLOCK=64", "BLOCK=128"}
    assert [event.us for event in measured] == [1000.0] * 3
    assert (plan.kind, plan.source) == ("plan", "exact")


def test_a_measurement_tells_why_it_failed(heard, monkeypatch):
    monkeypatch.delenv("TRITILE_TUNE_LOG", raising=False)
    kept = []
    keep = tasks.logged(lambda digest, trial: kept.append(trial))
    keep("digest", Trial(PROBLEM, tile(16, 16, 16), None, failure="no room"))
    (event,) = heard
    assert (event.kind, event.us, event.failure) == ("measure", None, "no room")
    assert len(kept) == 1


# --- Compiles ---


def test_a_compile_is_told_with_its_problem_and_whence_it_came(heard, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = tile(16, 16, 16)
    for _ in range(2):
        ahead.compiled_for(PROBLEM, config, HOPPER)
        for kernel in {event.kernel for event in heard}:  # forget what Triton keeps in memory
            assert kernel == "matmul_tile"
        _jitted().device_caches.clear()
    compiled, found = heard
    assert [(each.problem, each.config) for each in heard] == [(PROBLEM.label, str(config))] * 2
    assert (compiled.source, found.source) == ("compiled", "cache")
    assert compiled.seconds > found.seconds > 0


def _jitted():
    from tritile.families.matmul_tile.kernel import matmul_tile

    return matmul_tile


def compile_of(function, hit=False):
    """Have Triton's listener told of a compile of a jitted function."""
    source = SimpleNamespace(fn=function, constants={(2,): 64})
    metadata = {"num_warps": 2, "num_stages": 3}
    compiles._told(src=source, metadata=metadata, times=SimpleNamespace(total=25_000), cache_hit=hit)


def test_compiles_of_decorated_kernels_are_told_and_no_strangers(heard):
    @triton.jit
    def stranger(x_ptr, N, BLOCK: tl.constexpr):
        tl.store(x_ptr, N + BLOCK)

    compile_of(stranger)
    compiles._told(src=SimpleNamespace(), metadata={}, times=None, cache_hit=False)  # no Python source
    assert heard == []
    tritile.autotune([triton.Config({"BLOCK": 64})], [])(stranger)
    compile_of(stranger, hit=True)
    config = "BLOCK=64 num_warps=2 num_stages=3"
    assert heard == [Event("compile", "", config, "cache", kernel="stranger", seconds=0.025)]


def test_a_listener_of_the_users_own_goes_on_hearing(heard, monkeypatch):
    told = []
    monkeypatch.setattr(compiles, "_others", lambda **given: told.append(given["cache_hit"]))
    compile_of(_jitted(), hit=True)
    with compiles.compiles_heard() as seconds:
        triton.knobs.compilation.listener(
            src=SimpleNamespace(), metadata={}, times=SimpleNamespace(total=5e5), cache_hit=False
        )
    assert told == [True, False]
    assert seconds == [0.5]


def test_a_config_that_does_not_compile_is_told(heard, on_hopper, monkeypatch):
    def prepare(call, config, spare):
        if len(heard) < 2:
            raise TuningError("too large")
        return Launch()

    monkeypatch.setattr(launch, "prepare", prepare)
    tritile.matmul(torch.empty(256, 128), torch.empty(128, 192), precision="tf32")
    plan, failed = heard
    assert (failed.kind, failed.failure) == ("compile", "too large")
    assert (failed.problem, failed.config) == (plan.problem, plan.config)


# --- Logging ---


def test_the_log_has_a_line_for_each_event_of_the_kinds_asked_for(caplog):
    remove = observing.log_events(["plan", "measure"])
    for event in (PLAN, FAILED, Event("compile", "", "BLOCK=64")):
        events.tell(lambda event=event: event)
    remove()
    events.tell(lambda: PLAN)
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("tritile.plan", "INFO"),
        ("tritile.tune", "INFO"),
    ]
    assert caplog.records[0].event == PLAN
    assert caplog.messages[0] == (
        f'problem="{PROBLEM.label}" config="tile BLOCK_K=16" source=model device="NVIDIA H200" us=12.3 '
        "seconds=0.013"
    )
    assert caplog.messages[1].endswith("failure=\"out of resource: 'shared'\"")


@pytest.mark.parametrize("root_has_one", [False, True])
def test_a_handler_of_the_root_takes_the_place_of_ours(root_has_one, monkeypatch):
    ours, roots = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", ours)
    handlers = [logging.StreamHandler(roots)] if root_has_one else []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    remove = observing.log_events(["plan"])
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)  # set up after tritile was imported
    events.tell(lambda: PLAN)
    remove()
    told = roots if root_has_one else ours
    assert told.getvalue().count("source=model") == 1
    assert ours.getvalue() + roots.getvalue() == told.getvalue()


@pytest.mark.parametrize(
    ("value", "kinds"),
    [("", set()), ("plan", {"plan"}), (" tune, compile,", {"measure", "compile"}), ("all", {*events.KINDS})],
)
def test_the_variable_names_what_is_logged(value, kinds, monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", value)
    assert settings.logged_kinds() == kinds


def test_processes_whose_last_lines_are_read_log_nothing(monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", "all")
    monkeypatch.setenv("TRITILE_MODE", "off")
    given = []
    monkeypatch.setattr(child.subprocess, "Popen", lambda command, **how: given.append(how["env"]))
    child.ForkServer()._start().close()
    (environment,) = given
    assert "TRITILE_LOG" not in environment
    assert environment["TRITILE_MODE"] == "off"


def test_an_unknown_word_is_warned_of_and_the_others_count(monkeypatch):
    monkeypatch.setenv("TRITILE_LOG", "plans,tune")
    with pytest.warns(SettingWarning, match="TRITILE_LOG has plans: wanted plan, compile, tune or all"):
        assert settings.logged_kinds() == {"measure"}


def test_the_page_shows_lines_as_they_are_logged():
    page = (Path(tritile.__file__).parents[1] / "docs" / "observability.md").read_text()
    plan, compiled = re.findall(r"^\d.* tritile\.(?:plan|compile) (.*)$", page, re.MULTILINE)
    of_plan = replace(PLAN, source="predicted")
    of_compile = replace(PLAN, kind="compile", source="compiled", device="", us=None, kernel="matmul_tile")
    for shown, event in ((plan, of_plan), (compiled, of_compile)):
        names = [re.findall(r"(\w+)=(?:\"[^\"]*\"|\S+)", line) for line in (shown, observing.line_of(event))]
        assert names[0] == names[1]
