"""A config that is recalled, from wherever, runs only where the kernel's own pruning leaves it for the call.

The kernel has no masks: a block that does not divide n writes beyond its tensor, where guards lie.
"""

import json
import warnings

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tritile
from tests.unit.test_autotune import Bench
from tritile.core import settings as modes
from tritile.core.device import HOST
from tritile.errors import NotTunedError, UntunedWarning
from tritile.planning.kernel_table import KernelTable
from tritile.planning.store import store_of

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]
GUARD = 64


@triton.jit
def fill(out_ptr, used_ptr, n, flag: tl.constexpr, B: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0) * B + tl.arange(0, B), 1.0)
    tl.store(used_ptr, B)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["B"]),)


def dividing(configs, named, **rest):
    return [config for config in configs if named["n"] % config.kwargs["B"] == 0]


def decorated(blocks=(16, 32, 64), prune=dividing, bench=None, key=("n", "flag"), **more):
    bench = bench or Bench({block: 1.0 / block for block in (*blocks, 2, 4, 8, 16, 32, 64)})
    configs = [triton.Config({"B": block}) for block in blocks]
    pruned = {"early_config_prune": prune}
    kernel = tritile.autotune(configs, list(key), pruned, do_bench=bench, **more)(fill)
    return kernel, bench


def run(kernel, bench, n, flag=False):
    """Call the kernel; return the block that ran. Nothing beyond n may be written."""
    memory = torch.zeros(n + 2 * GUARD)
    kernel[grid](memory[GUARD : GUARD + n], bench.used, n, flag)
    assert bool((memory[GUARD : GUARD + n] == 1).all())
    assert not memory[:GUARD].any()
    assert not memory[GUARD + n :].any(), f"n={n}: {kernel.best_config} wrote past the end"
    return int(bench.used)


@pytest.mark.parametrize("mode", ["cached", "tune", "off"])
def test_a_neighbours_config_is_refused_by_the_pruning(mode):
    kernel, bench = decorated()
    assert run(kernel, bench, 64) == 64
    with tritile.mode(mode):
        assert run(kernel, bench, 48) == 16
        assert run(kernel, bench, 96) in (16, 32)
        assert run(kernel, bench, 64 * 3) == (16 if mode == "off" else 64)
    kernel, bench = decorated((8, 16, 64))
    run(kernel, bench, 64)
    with tritile.mode("cached"):
        assert run(kernel, bench, 48) == 16  # the next that is remembered: neither the winner nor the first


def test_values_of_one_bucket_are_each_pruned():
    kernel, bench = decorated(bucket={"n": triton.next_power_of_2})
    assert run(kernel, bench, 64) == 64
    for mode in ("cached", "tune", "strict"):
        with tritile.mode(mode):
            assert run(kernel, bench, 48) == 16
    kernel, bench = decorated((32, 64), bucket={"n": triton.next_power_of_2})
    run(kernel, bench, 128)
    measured = list(bench.measured)
    assert run(kernel, bench, 96) == 32
    assert bench.measured == measured  # 32 was measured as one of the bucket


def test_strict_raises_where_all_that_is_remembered_is_forbidden():
    kernel, bench = decorated((32, 64))
    run(kernel, bench, 64)
    kernel, bench = decorated((16, 32, 64), prune=lambda configs, named, **rest: configs[:1])
    with tritile.mode("strict"):
        assert run(kernel, bench, 64) == 16  # its only config needs no measurement
    kernel, bench = decorated((8, 16, 64), prune=lambda configs, named, **rest: configs[:2])
    with tritile.mode("strict"), pytest.raises(NotTunedError):
        run(kernel, bench, 64)


def table_of(kernel, path, device=HOST):
    """Write what the store holds of a kernel to a file, as `tritile export --kernel` does."""
    table, store = KernelTable(path, {}), store_of(device)
    problems = [(facts["kernel"], trial) for facts, trial in store.all_trials()]
    best = {}
    for digest, trial in problems:
        key = json.dumps(trial.problem.key)
        if digest == kernel.digest and (key not in best or trial.us < best[key].us):
            best[key] = trial
    assert table.add(device, kernel.digest, best.values()) == len(best)
    table.write()
    return path


@pytest.mark.parametrize("how", ["table", "TRITILE_TABLE"])
def test_a_shipped_tables_config_is_checked_like_any_other(how, tmp_path, monkeypatch):
    kernel, bench = decorated()
    run(kernel, bench, 64)
    path = table_of(kernel, tmp_path / "kernels.json")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "another machine"))
    more = {"table": path} if how == "table" else {}
    if how != "table":
        monkeypatch.setenv(how, str(path))
    kernel, bench = decorated(**more)
    assert run(kernel, bench, 64) == 64
    assert bench.measured == []  # it counts as measured
    with tritile.mode("strict"):
        assert run(kernel, bench, 64) == 64
    with tritile.mode("cached"):
        assert run(kernel, bench, 48) == 16
    kernel, bench = decorated(
        prune=lambda configs, named, **rest: [c for c in configs if c.kwargs["B"] < 64], **more
    )
    with tritile.mode("cached"):
        assert run(kernel, bench, 64) in (16, 32)


def test_a_neighbour_shares_all_but_sizes():
    bench = Bench({16: 3.0, 32: 2.0, 64: 1.0})
    kernel, _ = decorated(prune=lambda configs, named, **rest: configs, bench=bench)
    other = Bench({16: 2.0, 32: 1.0, 64: 3.0})
    for flag, told in ((False, bench), ("gelu", other)):
        kernel, _ = decorated(prune=lambda configs, named, **rest: configs, bench=told)
        kernel[grid](torch.zeros(320), told.used, 320, flag)
    kernel, bench = decorated(prune=lambda configs, named, **rest: configs, mode="cached")
    for flag, block in ((False, 64), ("gelu", 32), (True, 16), (None, 16), ("none", 16), (0, 16), (0.5, 16)):
        tritile.forget()  # as Python, a cache of this process takes 0 for False
        kernel[grid](torch.zeros(640), bench.used, 300, flag)
        assert int(bench.used) == block, flag


def test_a_constexpr_is_no_size():
    """Another constexpr is another kernel: it may not even fit where the neighbour's does."""

    @triton.jit
    def sized(out_ptr, used_ptr, n, B2: tl.constexpr, B: tl.constexpr):
        tl.store(out_ptr, B2)
        tl.store(used_ptr, B)

    bench = Bench({16: 2.0, 32: 1.0})
    kernel = tritile.autotune([triton.Config({"B": b}) for b in (16, 32)], ["n", "B2"], do_bench=bench)(sized)
    out = torch.zeros(4)
    kernel[(1,)](out, bench.used, 64, 4)
    for n, b2, block in ((128, 4, 32), (64, 8, 16)):
        with tritile.mode("cached"):
            kernel[(1,)](out, bench.used, n, b2)
        assert int(bench.used) == block


RULES = {
    "divides": lambda n, b, salt: n % b == 0,
    "divides, odd ones out": lambda n, b, salt: n % b == 0 and (b.bit_length() + salt) % 3 != 0,
    "divides, small alone": lambda n, b, salt: n % b == 0 and b <= max(2, n // (1 + salt % 4)),
}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_forbidden_config_is_launched(data, tmp_path_factory):
    """Drawn pruning and sizes, in every mode, with what earlier calls and a table left behind."""
    monkeypatch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("store")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(folder))
    try:
        blocks = data.draw(st.lists(st.sampled_from([2, 4, 8, 16]), min_size=1, max_size=4, unique=True))
        bucket = {"n": triton.next_power_of_2} if data.draw(st.booleans()) else None
        path = None
        for _ in range(data.draw(st.integers(2, 7))):
            rule, salt = data.draw(st.sampled_from(sorted(RULES))), data.draw(st.integers(0, 5))

            def prune(configs, named, rule=rule, salt=salt, **rest):
                left = [c for c in configs if RULES[rule](named["n"], c.kwargs["B"], salt)]
                return left or [triton.Config({"B": 2})]  # one of its own, which any of these sizes takes

            times = {b: data.draw(st.floats(0.1, 9.0)) for b in (2, 4, 8, 16)}
            kernel, bench = decorated(tuple(blocks), prune, Bench(times), bucket=bucket, table=path)
            n = 2 * data.draw(st.integers(1, 24))
            mode = data.draw(st.sampled_from([None, *modes.MODES]))
            kernel.mode = mode
            try:
                block = run(kernel, bench, n, data.draw(st.sampled_from([False, True, "x", None, 0.5])))
            except NotTunedError:
                assert mode == "strict"
                continue
            allowed = {c.kwargs["B"] for c in prune(kernel.configs, {"n": n})}
            assert block in allowed
            if data.draw(st.booleans()):
                path = table_of(kernel, folder / "table.json")
            if data.draw(st.booleans()):
                tritile.forget()
    finally:
        monkeypatch.undo()


def test_a_recalled_config_is_looked_up_without_reading_all_trials(monkeypatch):
    kernel, bench = decorated()
    for n in range(64, 64 * 40, 64):
        run(kernel, bench, n)
    tritile.forget()
    rows, read = [], __import__("tritile.planning.store", fromlist=["trial_from"]).trial_from
    monkeypatch.setattr("tritile.planning.store.trial_from", lambda row: rows.append(1) or read(row))
    with warnings.catch_warnings(), tritile.mode("cached"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(kernel, bench, 64 * 50) == 64
    assert len(rows) <= 3 * 8
