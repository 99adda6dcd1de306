"""`tritile export --kernel` and the tables of winners that it writes: what a library's author ships.

Kernels run on host tensors, so the command line is given the interpreter as its GPU.
"""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.commands import refused, run
from tests.unit.test_autotune import Bench
from tritile.core.config import Config
from tritile.core.device import HOST, target_device
from tritile.core.problem import KernelProblem, problem_key
from tritile.errors import NotTunedError, StoreWarning, UntunedWarning
from tritile.tuner.store import tables as kernel_table
from tritile.tuner.store.tables import FORMAT, KernelTable, read
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import Store, store_of

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")]
H200 = target_device("nvidia-h200")
TO_H200 = ("--target", "nvidia-h200")


@triton.jit
def fill(out_ptr, used_ptr, n, B: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, B), 1.0, mask=tl.arange(0, B) < n)
    tl.store(used_ptr, B)


def problem(n=64, kernel="softmax"):
    return KernelProblem(kernel, (("n", n),), (("x", "float32"),))


def block(size):
    return Config.of(B=size)


def remember(n=64, size=16, us=5.0, kernel="softmax", digest="new", day=1, **rest):
    trial = Trial(
        problem(n, kernel), block(size), us, measured_utc=f"2026-01-{day:02}T00:00:00+00:00", **rest
    )
    store_of(H200).add(digest, trial)


def shipped(path, digest="new", device=H200):
    """Return the blocks of a table's winners, by n."""
    return {
        dict(json.loads(text)["key"])["n"]: winner.config["B"]
        for text, winner in read(path).winners(device, digest).items()
    }


def decorated(blocks=(16, 32, 64), **more):
    bench = Bench({16: 3.0, 32: 1.0, 64: 2.0})
    configs = [triton.Config({"B": each}) for each in blocks]
    return tritile.autotune(configs, ["n"], do_bench=bench, **more)(fill), bench


def call(kernel, bench, n=64):
    kernel[(1,)](torch.zeros(64), bench.used, n)
    return int(bench.used)


def written(path, entries):
    """Write a table with these entries of a kernel, by problem."""
    gpus = {f"{HOST.name} {HOST.arch}": {decorated()[0].digest: entries}}
    path.write_text(json.dumps({"format": FORMAT, "gpus": gpus}))
    return path


def entry(size, us=1.0):
    return {"config": block(size).to_dict(), "us": us}


# --- tritile export --kernel ---


def test_library_ships_tuned(tmp_path, monkeypatch):
    kernel, bench = decorated()
    assert call(kernel, bench) == 32
    monkeypatch.setattr("tritile.cli.remembered.device_of", lambda target: HOST)
    path = tmp_path / "library" / "tuned.json"
    found = run("export", "--kernel", "fill", "--output", path)
    assert found.exit_code == 0, found.output
    first, adopting, last = found.stdout.splitlines()
    assert first == f"fill: 1 problem of {HOST.name} written to {path}"
    assert adopting == f"to adopt with it: tritile run --table {path} COMMAND"
    assert last == '@tritile.autotune(..., table=Path(__file__).with_name("tuned.json"))'
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "elsewhere"))
    kernel, bench = decorated(mode="strict", table=path)
    assert call(kernel, bench) == 32
    assert bench.measured == []
    with pytest.raises(NotTunedError):
        call(kernel, bench, 48)
    kernel, bench = decorated(mode="strict")
    with pytest.raises(NotTunedError):
        call(kernel, bench)


def test_an_adopted_kernel_is_shipped(tmp_path, monkeypatch):
    """Under triton.autotune: what one machine measured, another takes by the table that it is given."""
    monkeypatch.setattr("tritile.cli.remembered.device_of", lambda target: HOST)
    path, bench = tmp_path / "kernels.json", Bench({16: 3.0, 32: 1.0, 64: 2.0})

    def adopted():
        return triton.autotune([triton.Config({"B": b}) for b in (16, 32, 64)], ["n"], do_bench=bench)(fill)

    with tritile.adopt():
        assert call(adopted(), bench) == 32
    assert "fill" in run("show", "--kernel", "fill").stdout
    assert run("export", "--kernel", "fill", "--output", path).exit_code == 0
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "elsewhere"))
    bench.measured.clear()
    with tritile.adopt(table=path, mode="strict") as adoption:
        assert call(adopted(), bench) == 32
    assert (bench.measured, adoption.report[0].remembered) == ([], 1)


def test_table_of_another_source_says_so(tmp_path):
    kernel, bench = decorated()
    gpus = {f"{HOST.name} {HOST.arch}": {"another": {problem_key(problem(64, "fill")): entry(16)}}}
    (tmp_path / "kernels.json").write_text(json.dumps({"format": FORMAT, "gpus": gpus}))
    kernel, bench = decorated(table=tmp_path / "kernels.json")
    with pytest.warns(StoreWarning, match="another source of the kernel.*export it again") as warned:
        assert call(kernel, bench) == 32
    assert call(kernel, bench, 48) == 32
    assert len(warned) == 1


def test_best_working_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remember(size=16, us=5.0)
    remember(size=32, us=4.0)
    remember(size=64, us=None, failure="wrong answer")
    remember(size=16, us=4.5, n=128, error=0.0)  # checked: goes before one that was only timed
    remember(size=32, us=4.0, n=128)
    remember(size=64, us=None, n=256, failure="out of memory")
    remember(kernel="layer_norm", digest="other")
    assert run("export", "--kernel", "softmax", *TO_H200).exit_code == 0
    assert shipped(tmp_path / "kernels.json") == {64: 32, 128: 16}
    assert list(read(tmp_path / "kernels.json").entries) == ["NVIDIA H200 90"]


def test_equal_problems_each_written(tmp_path):
    sizes = {"int": (1, 16), "float": (1.0, 32), "bool": (True, 64)}
    for n, size in sizes.values():
        remember(n=n, size=size)
    path = tmp_path / "t.json"
    assert "softmax: 3 problems" in run("export", "--kernel", "softmax", "--output", path, *TO_H200).stdout
    found = read(path)
    for name, (n, size) in sizes.items():
        assert found.find(H200, "new", problem(n)).config == block(size), name


def test_each_source_is_written(tmp_path):
    """Two kernels of one name are told apart by their sources alone."""
    remember(digest="newer", size=32, day=9)
    remember(digest="older", size=16, day=2)
    remember(digest="older", size=64, n=128, day=3)
    remember(kernel="layer_norm", digest="other")
    path = tmp_path / "t.json"
    found = run("export", "--kernel", "library.softmax", "--output", path, *TO_H200)
    assert "softmax: 3 problems of 2 sources of NVIDIA H200" in found.stdout
    assert (shipped(path, "newer"), shipped(path, "older")) == ({64: 32}, {64: 16, 128: 64})
    assert shipped(path, "other") == {}
    found = run("export", "--kernel", "*", "--output", path, *TO_H200)
    assert "layer_norm: 1 problem of NVIDIA H200" in found.stdout


def test_a_name_is_itself_before_it_is_one_with_a_module(tmp_path):
    """Deleting a method's trials leaves those of a function of its name."""
    remember(kernel="Model.relu", digest="method")
    remember(kernel="relu", digest="function")
    for words, gone in (("Model.relu", "Model.relu"), ("library.relu", "relu")):
        run("clear", "--kernel", words, "--yes", *TO_H200)
        left = {trial.problem.kernel for _, trial in store_of(H200).all_trials()}
        assert left == {"Model.relu", "relu"} - {"Model.relu", gone}


@pytest.mark.parametrize("change", [{"triton": "3.0.0"}, {"compiler": "12.0"}, {"processors": 7}])
def test_other_environment_not_written(change, tmp_path):
    Store(H200.__class__(**H200.to_dict() | change), tmp_path).add("new", Trial(problem(), block(16), 1.0))
    told = refused("export", "--kernel", "softmax", "--output", tmp_path / "t.json", *TO_H200, status=1)
    assert told == 'nothing is remembered of softmax on NVIDIA H200: call it once in mode "tune"'


def test_existing_table_completed(tmp_path):
    path, a100 = tmp_path / "t.json", target_device("sm_80")
    table = KernelTable(path, {})
    table.add(a100, "new", [Trial(problem(), block(64), 9.0)])
    table.add(H200, "of another kernel", [Trial(problem(kernel="layer_norm"), block(64), 9.0)])
    table.add(H200, "new", [Trial(problem(n), block(64), 9.0) for n in (64, 128)])
    table.write()
    remember(n=64, size=16)
    remember(n=256, size=32)
    remember(kernel="relu", digest="relu's")
    found = run("export", "--kernel", "softmax", "--kernel", "relu", "--output", path, *TO_H200)
    assert found.exit_code == 0, found.output
    assert len(found.stdout.splitlines()) == 4
    assert shipped(path) == {64: 16, 128: 64, 256: 32}
    assert shipped(path, device=a100) == {64: 64}
    assert shipped(path, "of another kernel") == {64: 64}
    assert shipped(path, "relu's") == {64: 16}
    before = path.read_bytes()
    assert run("export", "--kernel", "relu", "--kernel", "softmax", "--output", path, *TO_H200).exit_code == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "notes", "[]", '{"format": 3}', '{"format": "tritile kernels 1"}'])
def test_another_file_is_left_untouched(text, tmp_path):
    remember()
    path = tmp_path / "t.json"
    path.write_text(text)
    told = refused("export", "--kernel", "softmax", "--output", path, *TO_H200, status=1)
    assert f"{path} is no table of kernels" in told
    assert path.read_text() == text


def test_unexportable_is_refused(tmp_path, monkeypatch):
    remember()
    remember(kernel="layer_norm", digest="other")
    path = tmp_path / "t.json"
    names = "--kernel", "softmax", "--kernel", "relu"
    told = refused("export", *names, "--output", path, *TO_H200, status=1)
    assert told == "nothing is remembered of relu on NVIDIA H200: there is layer_norm, softmax"
    assert not path.exists()
    told = refused("export", "--output", path, *TO_H200, status=1)
    wanted = "of NVIDIA H200 but of decorated kernels: --kernel writes layer_norm, softmax"
    assert told == f"nothing is remembered {wanted}"
    assert "--replace" in refused("export", "--kernel", "softmax", "--replace", "--output", path, *TO_H200)
    assert "is a folder" in refused("export", "--kernel", "softmax", "--output", tmp_path, *TO_H200)
    monkeypatch.setattr(kernel_table, "MAX_BYTES", 100)
    assert "is not written" in refused("export", "--kernel", "softmax", "--output", path, *TO_H200)
    assert not path.exists()


# --- A table of another GPU with the same architecture ---


def key_of(bench, n=64):
    return problem_key(decorated()[0].problem((torch.zeros(64), bench.used, n), {}))


def several(path, **blocks):
    """Write a table whose entries for n = 64 are these blocks, by GPU model: `of_h100_90=16`."""
    kernel, bench = decorated()
    gpus = {model: {kernel.digest: {key_of(bench): entry(size)}} for model, size in blocks.items()}
    path.write_text(json.dumps({"format": FORMAT, "gpus": gpus}))
    return path


def test_similar_gpus_winner_is_taken(tmp_path):
    path = several(tmp_path / "t.json", **{"a similar GPU host": 64, "another 90": 16})
    kernel, bench = decorated(table=path)
    with pytest.warns(UntunedWarning, match="on host with .* on a similar GPU, .*t.json") as warned:
        assert call(kernel, bench) == 64
    (warning,) = warned
    assert warning.filename == __file__
    tritile.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        for mode, n in (("strict", 64), ("cached", 64), ("cached", 60)):  # 60: the nearest
            with tritile.mode(mode):
                assert call(kernel, bench, n) == 64
    assert bench.measured == []
    plan = tritile.plan(kernel, torch.zeros(64), bench.used, 64)
    assert (plan.source, "measured on a similar GPU, which has" in plan.why) == ("table", True)


@pytest.mark.parametrize("pinned", [False, True])
def test_own_winner_before_a_similar_gpus(tmp_path, monkeypatch, pinned):
    """Also if it is in the table that comes second."""
    similar = {"a similar GPU host": 64}
    path = several(tmp_path / "t.json", **{"host host": 16}, **({} if pinned else similar))
    if pinned:
        monkeypatch.setenv("TRITILE_TABLE", str(several(tmp_path / "pinned.json", **similar)))
    kernel, bench = decorated(table=path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        assert call(kernel, bench) == 16


@pytest.mark.parametrize("model", ["a similar GPU host", "host 90"])
def test_what_other_gpus_cannot_offer(tmp_path, model):
    """A config that this kernel does not have, and one of another architecture."""
    blocks = (16, 32) if model.endswith("host") else (16, 32, 64)
    kernel, bench = decorated(blocks, table=several(tmp_path / "t.json", **{model: 64}), mode="cached")
    assert call(kernel, bench) == 16
    with tritile.mode("tune"):
        kernel, bench = decorated(blocks, table=tmp_path / "t.json")
        assert call(kernel, bench) == 32


def test_the_most_similar_gpu_first():
    h100, h20, h800 = (target_device(name) for name in ("h100", "h20", "h800"))
    table = KernelTable(Path("t.json"), {})
    for size, device in enumerate((h20, h800, h100), 1):
        table.add(device, "new", [Trial(problem(n), block(size), 1.0) for n in (1, 2, 3)[: 4 - size]])
    unknown = H200.__class__(**H200.to_dict() | {"name": "An unknown GPU"})
    table.add(unknown, "new", [Trial(problem(n), block(9), 1.0) for n in (1, 2, 3, 4)])
    table.add(target_device("a100"), "new", [Trial(problem(5), block(9), 1.0)])
    found = {n: table.find(H200, "new", problem(n)) for n in (1, 2, 3, 4, 5)}
    assert {n: each and (each.config["B"], each.gpu) for n, each in found.items()} == {
        1: (3, h100.name), 2: (2, h800.name), 3: (1, h20.name), 4: (9, "An unknown GPU"), 5: None,
    }  # fmt: skip


# --- A table that is damaged, or forged ---

OWN = {"op": "kernel", "kernel": "fill", "key": [["n", 64]], "dtypes": []}
KEY = problem_key(KernelProblem("fill", (("n", 32),), ()))
BAD = {  # other forms of problems, configs and numbers: in test_table
    "no JSON": ("x", entry(32)),
    "a problem of tritile's own": (json.dumps({"op": "matmul"}), entry(32)),
    "another spelling": (json.dumps(OWN), entry(32)),
    "an endless size": (problem_key(KernelProblem("fill", (("n", 10**400),), ())), entry(32)),
    "no entry": (KEY, None),
    "no config": (KEY, {"us": 1.0}),
    "no time": (KEY, entry(32, None)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_entry_warns_once(name, tmp_path):
    text, value = BAD[name]
    text = text.replace('"dtypes":[]', '"dtypes":[["out_ptr","float32"],["used_ptr","int32"]]')
    kernel, bench = decorated()
    good = problem_key(kernel.problem((torch.zeros(1), bench.used, 64), {}))
    path = written(tmp_path / "t.json", {text: value, good: entry(64)})
    kernel, bench = decorated(mode="cached", table=path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", StoreWarning)
        for n in (64, 48, 32, 16):  # the second and later ask for neighbours, among which the bad one is
            assert call(kernel, bench, n) == 64
    (one,) = [each for each in found if each.category is StoreWarning]
    assert "t.json: skipped 1 of 2 entries" in str(one.message)
    assert one.filename == __file__


WHOLE = {  # other files that are no JSON: in test_table
    "cut": '{"format": "tritile kernels 1", "gpus": {"NVIDIA',
    "of another format": '{"format": "tritile kernels 2"}',
    "no dictionary": "[1]",
    "without GPUs": json.dumps({"format": FORMAT}),
    "kernels that are no dictionary": json.dumps({"format": FORMAT, "gpus": {"x": [["y", []]]}}),
    "too large": " " * (kernel_table.MAX_BYTES + 1),
    "missing": None,
}


@pytest.mark.parametrize("how", ["table", "TRITILE_TABLE"])
@pytest.mark.parametrize("name", WHOLE)
def test_bad_file_warns_once(name, how, tmp_path, monkeypatch):
    path, text = tmp_path / "t.json", WHOLE[name]
    if text is not None:
        path.write_text(text)
    if how == "TRITILE_TABLE":
        monkeypatch.setenv(how, str(path))
    kernel, bench = decorated(mode="cached", **({"table": path} if how == "table" else {}))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", StoreWarning)
        for n in (64, 48, 32):
            assert call(kernel, bench, n) == 16
    found = [str(each.message) for each in found if each.category is StoreWarning]
    (message,) = found
    assert "t.json is no table of kernels" in message
    assert message.count("t.json") == 1


def test_pinned_operations_no_kernels(monkeypatch):
    path = Path(tritile.__file__).parent / "tables" / "nvidia-h200.json"
    monkeypatch.setenv("TRITILE_TABLE", str(path))
    kernel, bench = decorated(mode="cached")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        assert call(kernel, bench, 64) == 16


def test_replaced_file_is_read(tmp_path):
    """Also where its size and time are the same, as of files that an installer unpacks."""
    kernel, bench = decorated()
    text = problem_key(kernel.problem((torch.zeros(1), bench.used, 64), {}))
    path = tmp_path / "t.json"
    for size in (64, 32):
        new = written(tmp_path / "new", {text: entry(size)})
        os.utime(new, ns=(10**18, 10**18))
        new.replace(path)
        kernel, bench = decorated(mode="strict", table=path)
        assert call(kernel, bench) == size
    path.unlink()
    kernel, bench = decorated(mode="strict", table=path)
    with pytest.warns(StoreWarning, match="does not exist"), pytest.raises(NotTunedError):
        call(kernel, bench)
