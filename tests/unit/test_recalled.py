"""A config that is recalled, from wherever, runs only where the kernel's own pruning leaves it for the call.

The kernel has no masks: a block that does not divide n writes beyond its tensor, where guards lie.
"""

import contextlib
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
from tritile.tuner.store import trials as store
from tritile.tuner.store.tables import KernelTable
from tritile.tuner.store.trials import store_of

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


def keep_all(configs, named, **rest):
    return configs


def first(count):
    return lambda configs, named, **rest: configs[:count]


BUCKET = {"n": triton.next_power_of_2}
# At which n the kernel of BLOCKs 16, 32 and 64 was tuned, and in which bucket. Then, in a mode, a kernel of
# other BLOCKs or of another pruning is called at an n: the BLOCK that runs, None where strict raises.
RECALLED = {
    "allowed": (64, None, "cached", {}, 192, 64),
    "forbidden: the nearest's next": (64, None, "cached", {}, 48, 16),
    "neither the winner nor the first": (64, None, "cached", {"blocks": (8, 16, 64)}, 48, 16),
    "measured": (64, None, "tune", {}, 48, 16),
    "off": (64, None, "off", {}, 192, 16),
    "a bucket": (64, BUCKET, "cached", {}, 48, 16),
    "a bucket that is measured": (64, BUCKET, "tune", {}, 48, 16),
    "a bucket where strict": (64, BUCKET, "strict", {}, 48, 16),
    "strict": (64, None, "strict", {}, 64, 64),
    "strict, an only config": (64, None, "strict", {"prune": first(1)}, 64, 16),
    "strict, all forbidden": (64, None, "strict", {"blocks": (4, 8, 64), "prune": first(2)}, 64, None),
}


@pytest.mark.parametrize("name", RECALLED)
def test_recalled_where_pruning_leaves_it(name):
    tuned_at, bucket, mode, other, n, block = RECALLED[name]
    run(*decorated(bucket=bucket), tuned_at)
    kernel, bench = decorated(**other, bucket=bucket, mode=mode)
    with pytest.raises(NotTunedError) if block is None else contextlib.nullcontext():
        assert run(kernel, bench, n) == block
    assert not (bucket and bench.measured)  # what may run was measured as one of the bucket


def table_of(kernel, path):
    """Write what the store holds of a kernel to a file, as `tritile export --kernel` does."""
    table, best = KernelTable(path, {}), {}
    for facts, trial in store_of(HOST).all_trials():
        key = trial.problem.key
        if facts["kernel"] == kernel.digest and (key not in best or trial.us < best[key].us):
            best[key] = trial
    assert table.add(HOST, kernel.digest, best.values()) == len(best)
    table.write()
    return path


def test_shipped_config_is_checked(tmp_path, monkeypatch):
    kernel, bench = decorated()
    run(kernel, bench, 64)
    path = table_of(kernel, tmp_path / "kernels.json")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "another machine"))
    for mode, prune, n, block in (
        ("tune", dividing, 64, 64), ("cached", dividing, 48, 16), ("cached", first(1), 64, 16)
    ):  # fmt: skip
        kernel, bench = decorated(prune=prune, table=path, mode=mode)
        assert run(kernel, bench, n) == block
        assert bench.measured == []


# The constexpr `flag` of a call and the BLOCK that runs, where 64 is the fastest of False, 32 of others.
FLAGS = {False: 64, "gelu": 32, 4: 32, 8: 16, True: 16, None: 16, "none": 16, 0.5: 16}


def test_a_neighbour_shares_all_but_sizes():
    """A constexpr is no size: another one is another kernel, which may not even fit there."""
    for flag, fastest in ((False, 64), ("gelu", 32), (4, 32)):
        bench = Bench({block: 1.0 if block == fastest else 2.0 for block in (16, 32, 64)})
        run(*decorated(prune=keep_all, bench=bench), 320, flag)
    kernel, bench = decorated(prune=keep_all, mode="cached")
    for flag, block in [*FLAGS.items(), (0, 16)]:
        tritile.forget()  # as Python, a cache of this process takes 0 for False
        kernel[grid](torch.zeros(640), bench.used, 300, flag)
        assert int(bench.used) == block, flag


RULES = {
    "divides": lambda n, b, salt: n % b == 0,
    "divides, odd ones out": lambda n, b, salt: n % b == 0 and (b.bit_length() + salt) % 3 != 0,
    "divides, small alone": lambda n, b, salt: n % b == 0 and b <= max(2, n // (1 + salt % 4)),
}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_forbidden_config_is_launched(data, tmp_path_factory):
    """Drawn pruning and sizes, in every mode, with what earlier calls and a table left behind."""
    folder, path = tmp_path_factory.mktemp("store"), None
    blocks = data.draw(st.lists(st.sampled_from([2, 4, 8, 16]), min_size=1, max_size=4, unique=True))
    bucket = data.draw(st.sampled_from([BUCKET, None]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITILE_CACHE_DIR", str(folder))
        for _ in range(data.draw(st.integers(2, 7))):
            rule, salt = data.draw(st.sampled_from(sorted(RULES))), data.draw(st.integers(0, 5))

            def prune(configs, named, rule=rule, salt=salt, **rest):
                left = [c for c in configs if RULES[rule](named["n"], c.kwargs["B"], salt)]
                return left or [triton.Config({"B": 2})]  # one of its own, which any of these sizes takes

            times = {b: data.draw(st.floats(0.1, 9.0)) for b in (2, 4, 8, 16)}
            mode = data.draw(st.sampled_from([None, *modes.MODES]))
            kernel, bench = decorated(
                tuple(blocks), prune, Bench(times), bucket=bucket, table=path, mode=mode
            )
            n, flag = (
                2 * data.draw(st.integers(1, 24)),
                data.draw(st.sampled_from([False, True, "x", None, 0.5])),
            )
            try:
                block = run(kernel, bench, n, flag)
            except NotTunedError:
                assert mode == "strict"
                continue
            assert block in {c.kwargs["B"] for c in prune(kernel.configs, {"n": n})}
            if data.draw(st.booleans()):
                path = table_of(kernel, folder / "table.json")
            if data.draw(st.booleans()):
                tritile.forget()


def test_recall_without_reading_all(monkeypatch):
    kernel, bench = decorated()
    for n in range(64, 64 * 13, 64):
        run(kernel, bench, n)
    tritile.forget()
    rows, read = [], store.trial_from
    monkeypatch.setattr(store, "trial_from", lambda row: rows.append(1) or read(row))
    with warnings.catch_warnings(), tritile.mode("cached"):
        warnings.simplefilter("error", UntunedWarning)
        assert run(kernel, bench, 64 * 50) == 64
    assert len(rows) <= 3 * 8
