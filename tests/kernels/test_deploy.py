"""A folder of kernels made without a GPU: another process finds all of it, and what it lacks is told."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime import build
from typer.testing import CliRunner

import tritile
from tests import configs
from tests.ahead import paired, with_clusters
from tests.configs import turned
from tritile import cli
from tritile.core.device import Device, target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError, NotCompiledError, TuningError
from tritile.families import registry as families
from tritile.ops import run as running
from tritile.planning import gpu_tables, model, plans, table
from tritile.planning.classes import class_of
from tritile.runtime import ahead, launch, offline
from tritile.runtime.compiles import compiles_heard, compiles_refused
from tritile.tune.deploy import fill, folder, modules, rows
from tritile.tune.deploy import fill as deployment
from tritile.tune.measure import pool
from tritile.tune.measure.child import ForkServer
from tritile.tune.measure.pool import CompilePool
from tritile.tune.suites import Case

H200 = target_device("nvidia-h200")


tile = functools.partial(configs.tile, stages=2)
tma = functools.partial(configs.tma, 64, 64, 64)


# As torch's own contiguous tensors pose them: DEEP shares a kernel with SQUARE, RAGGED copies both operands
# first, SPLIT takes counters and a workspace.
SQUARE = MatmulProblem(1, 256, 256, 256, "float16", "float16")
DEEP = MatmulProblem(1, 256, 256, 512, "float16", "float16")
RAGGED = MatmulProblem(1, 129, 131, 133, "bfloat16", "bfloat16", a_align=2, b_align=2, out_align=2)
SPLIT = MatmulProblem(1, 64, 64, 1024, "float16", "float16")
TURN = PermuteProblem.turned(1, 128, 256, 2)
ENTRIES = [
    (SQUARE, tile(32, 32, 32)), (DEEP, tile(32, 32, 32)), (RAGGED, tma()), (SPLIT, tma(split=2)),
    (TURN, turned(32, 32)),
]  # fmt: skip
KERNELS = 5  # distinct: DEEP's is SQUARE's, and RAGGED takes two

SCRIPT = """
import json, sys
from pathlib import Path
import torch, triton, tritile
from tritile.runtime import ahead, launch, offline; from tritile.planning import plans, table
from tritile.ops import permute; from tritile.ops.described import described

heard = []
triton.knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
entries, device = table.read(Path(sys.argv[1])).entries, tritile.target_device("nvidia-h200")
with offline.compiling_for(device):
    for entry in entries:
        problem = entry.problem
        if problem.op == "matmul":
            kind = getattr(torch, problem.dtype)
            a = torch.empty(problem.m, problem.k, dtype=kind)
            b = torch.empty(problem.k, problem.n, dtype=kind)
            call = described(a, b, a.new_empty(problem.m, problem.n), "ieee")
        else:
            columns, rows = problem.shape
            x = torch.empty(rows, columns, dtype=torch.bfloat16)
            call = permute.described(x, x.new_empty(columns, rows), [1, 0])
        assert call.problem == problem, (call.problem, problem)
        workspace = lambda dtype: launch._At(0, getattr(torch, dtype))
        for compiled in launch.compiles_of(call, entry.config, device, workspace):
            assert compiled().asm["ptx"]
print(json.dumps([tritile.__file__, triton.knobs.cache.dir, heard.count(True), heard.count(False)]))
"""


def contents(place: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of last change of every file of a folder, and of every folder in it."""
    return {
        str(path.relative_to(place)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "", path.stat().st_mtime_ns
        )
        for path in sorted(place.rglob("*"))
    }  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli.app, ["compile", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder filled by the command line, the table it was filled from, and where it is to be used."""
    base = tmp_path_factory.mktemp("deploy")
    entries = tuple(table.Entry(problem, config, 1.0) for problem, config in ENTRIES)
    table.write(table.Table(H200.to_dict(), True, families.digests(), entries), base / "table.json")
    done = run("--table", base / "table.json", "--output", base / "made", "--at", base / "used", "--jobs", 2)
    assert done.exit_code == 0, done.output
    assert f"{KERNELS} kernels of {len(ENTRIES)} problems" in done.output
    assert f"0 of them there already, {KERNELS} compiled" in done.output
    shutil.copytree(base / "made", base / "used")
    return base


class Kept(ForkServer):
    """Outlives the pools that fork their processes from it: it imports torch once, in seconds."""

    def close(self):
        """Nothing yet."""

    def end(self):
        super().close()


@pytest.fixture(scope="module")
def fork_server():
    kept = Kept()
    yield kept
    kept.end()


@pytest.fixture
def quick(fork_server, monkeypatch):
    """Compiling processes of their own for each fill, which are there at once."""
    monkeypatch.setattr(pool, "CompilePool", functools.partial(CompilePool, fork_server=fork_server))


@pytest.fixture
def copied(made, tmp_path):
    """A copy that may be harmed: the arguments that say what it was made for, and the folder."""
    shutil.copytree(made / "made", tmp_path / "copy")
    return ("--table", made / "table.json", "--at", made / "used"), tmp_path / "copy"


def test_another_process_with_another_installation_finds_every_kernel(made, tmp_path):
    used, elsewhere = made / "used", tmp_path / "installed"
    shutil.copytree(Path(tritile.__file__).parent, elsewhere / "tritile")
    before = contents(used)
    for path in (used, *used.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "TRITILE_"))}
    env |= {"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(used), "PYTHONPATH": str(elsewhere)}
    if found := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + found  # Triton may be found by it
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(made / "table.json")],
        capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, cache, hits, misses = json.loads(done.stdout)
    assert Path(where).is_relative_to(elsewhere)
    assert (Path(cache), hits, misses) == (used, KERNELS, 0)
    assert contents(used) == before
    assert not (tmp_path / ".triton").exists()


def test_a_complete_folder_is_proven_complete_without_writing(made):
    before = contents(made / "used")
    done = run("--table", made / "table.json", "--check", made / "used")
    assert done.exit_code == 0, done.output
    assert f"{KERNELS} kernels of {len(ENTRIES)} problems" in done.output
    assert contents(made / "used") == before


def test_a_folder_at_another_place_than_it_was_made_for_is_not_complete(made):
    done = run("--table", made / "table.json", "--check", made / "made")
    assert done.exit_code == 1
    assert done.output.count("missing: ") == KERNELS
    assert f"made to be at {made / 'used'}" in done.output
    assert run("--table", made / "table.json", "--check", made / "made", "--at", made / "used").exit_code == 0


def test_only_what_launches_read_is_kept(made):
    kept = {path.suffix for path in (made / "made").rglob("*") if path.is_file()}
    assert kept == {".cubin", ".ptx", ".json", ".so"}


def test_missing_files_are_told_and_made_again(copied, quick):
    which, place = copied
    lost = {"permute_tile.cubin": TURN, "repack.ptx": RAGGED, "matmul_tile.json": SQUARE}
    for number, (name, problem) in enumerate(lost.items(), 1):
        next(place.rglob(name)).unlink()
        before = contents(place)
        done = run(*which, "--check", place)
        assert done.exit_code == 1
        assert done.output.count("missing: ") == number
        assert f"missing: a kernel of {problem.label} with" in done.output
        assert contents(place) == before
    done = run(*which, "--output", place)
    assert done.exit_code == 0, done.output
    assert f"{KERNELS - len(lost)} of them there already, {len(lost)} compiled" in done.output
    assert run(*which, "--check", place).exit_code == 0


def test_files_outside_the_folder_stay_whatever_a_group_file_names(copied, tmp_path, quick):
    told, place = copied
    precious = [tmp_path / "precious.ttir", tmp_path / "costly.ttir"]
    for path in precious:
        path.write_text("of somebody else")
    group = next(place.glob("*/__grp__*.json"))
    paths = json.loads(group.read_text())["child_paths"]
    paths |= {"../../precious.ttir": "anywhere", str(precious[1]): "anywhere"}
    group.write_text(json.dumps({"child_paths": paths}))
    assert "missing: a kernel" in run(*told, "--check", place).output
    done = run(*told, "--output", place, "--jobs", 1)
    assert done.exit_code == 0, done.output
    assert [path.read_text() for path in precious] == ["of somebody else"] * 2
    assert sorted(path.suffix for path in group.parent.iterdir()) == [".cubin", ".json", ".json", ".ptx"]


def test_a_module_of_triton_is_missed_and_built_again(copied):
    which, place = copied
    lost = next(place.rglob("cuda_utils*"))
    lost.unlink()
    done = run(*which, "--check", place)
    assert done.exit_code == 1
    assert f"missing: {lost.relative_to(place)}" in done.output
    assert run(*which, "--output", place).exit_code == 0
    assert lost.is_file()


def test_without_a_c_compiler_the_kernels_are_there_and_the_module_is_refused(copied, monkeypatch):
    which, place = copied
    next(place.rglob("cuda_utils*")).unlink()
    monkeypatch.setenv("CC", "/no/such/compiler")
    done = run(*which, "--output", place)
    assert done.exit_code == 1
    assert "refused: cuda_utils: FileNotFoundError" in done.output
    assert "refused: a kernel" not in done.output


def test_triton_finds_its_modules_where_they_were_put(made, monkeypatch):
    """By Triton's own look-up, as it starts a driver and as it makes a launcher."""
    found = []
    monkeypatch.setattr(build, "_load_module_from_path", lambda name, path: found.append(path) or MagicMock())
    monkeypatch.setattr(build, "_build", lambda *args, **how: pytest.fail("built again"))
    dirs = modules._library_dirs()
    monkeypatch.setattr(driver, "library_dirs", lambda: dirs)
    for name in ("PyCUtensorMap", "PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        monkeypatch.setattr(driver, name, None, raising=False)  # what a driver sets as it starts
    with folder.reading(made / "used", made / "used"), offline.compiling_for(H200, object()):
        kernels = [c() for problem, config in ENTRIES for c in ahead.compiles_for(problem, config, H200)]
    wanted = {module for kernel in (None, *kernels) for module in modules.modules_of(kernel)}
    with folder.writing(made / "used"):
        driver.CudaUtils.__init__(SimpleNamespace())
        for kernel in kernels if hasattr(driver, "make_launcher") else ():
            driver.CudaLauncher(kernel.src, kernel.metadata)
    assert set(found) == {str(made / "used" / module.path) for module in wanted}


def test_a_module_of_triton_loads_beside_a_driver(made, tmp_path):
    """One of the driver's name that has its functions, which is all that loading asks for."""
    modules._stand_in([module.source for module in modules.modules_of(None)], tmp_path)
    built = next((made / "used").rglob(f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"))
    code = (
        "import ctypes, importlib.util, sys\n"
        "ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)\n"
        "spec = importlib.util.spec_from_file_location('cuda_utils', sys.argv[2])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(callable(module.load_binary))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "libcuda.so.1"), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


@with_clusters
def test_kernels_of_clusters_are_found_again(tmp_path, quick):
    """With the copies that go before them, and without a GPU; for another Triton they are refused."""
    entries = [(SQUARE, paired(64, 128, 2)), (RAGGED, paired(128, 192, 1, True))]
    done = fill.fill(entries, H200, tmp_path, jobs=2)
    assert (done.compiled, done.found.lines) == (3, [])
    found = fill.check(entries, H200, tmp_path)
    assert (len(found.kernels), found.lines) == (3, [])
    other = fill.check(entries, replace(H200, triton="3.6.0"), tmp_path)
    assert [line.split(":")[-1] for line in other.lines] == [" clusters were checked with 3.7 alone"] * 2


def test_what_is_refused_is_told_and_the_rest_compiled(tmp_path, quick):
    worse = [(SQUARE, tile(512, 512, 32)), (SPLIT, tma(split=64)), (TURN, turned(32, 32))]
    done = fill.fill(worse, H200, tmp_path / "out", jobs=1)
    assert (done.compiled, len(done.found.kernels), len(done.found.missing)) == (1, 1, 0)
    large, deep = done.found.lines
    assert large.startswith(f"refused: {SQUARE.label} with tile")
    assert deep.startswith(f"refused: {SPLIT.label} with descriptor")
    assert "SPLIT_K = 64" in deep


def test_what_the_compiler_refuses_is_told(tmp_path, monkeypatch, quick):
    fp8 = MatmulProblem(1, 64, 64, 64, "float8_e4m3fn", "bfloat16")
    monkeypatch.setattr(fill, "illegal", lambda *args: None)  # the compiler is to find it
    done = fill.fill([(fp8, tile(32, 32, 32))], target_device("sm_80"), tmp_path / "out", jobs=1)
    assert (done.compiled, len(done.found.missing), len(done.found.lines)) == (0, 1, 1)
    assert done.found.lines[0].startswith(f"refused: {fp8.label} with tile")


def test_shapes_take_the_configs_of_calls(tmp_path, quick):
    shape = ("512x512x512", "--dtype", "float16", "--target", "nvidia-h200")
    done = run(*shape, "--output", tmp_path / "out", "--jobs", 1)
    assert done.exit_code == 0, done.output
    assert "1 kernels of 1 problems on NVIDIA H200" in done.output
    assert list((tmp_path / "out").rglob("matmul_warpgroups.cubin"))  # which the shipped table names


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--target", "nvidia-h200"], "one folder"),
        (["--target", "nvidia-h200", "--output", "a", "--check", "b"], "one folder"),
        (["--target", "sm_80", "--output", "a"], "no table of NVIDIA A100"),
        (["--target", "gfx942", "8x8x8", "--output", "a"], "NVIDIA GPUs only"),
        (["--target", "sm_1", "--output", "a"], "sm_1"),
        (["--target", "nvidia-h200", "--output", "a", "--at", "b"], "not an absolute path"),
        (["--target", "nvidia-h200", "--check", "no/such/folder"], "no/such/folder is not a folder"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_made(arguments, wanted, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tritile", "compile", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == (1 if "gfx942" in arguments else 2)  # the usage is right, and not supported
    assert wanted in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_another_gpu_is_refused(made, capsys, monkeypatch):
    arguments = ["--table", str(made / "table.json"), "--target", "sm_90", "--check", str(made / "used")]
    monkeypatch.setattr("sys.argv", ["tritile", "compile", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert "the table is of NVIDIA H200, and --target NVIDIA H100" in capsys.readouterr().err


def test_a_device_is_read_back_with_the_versions_that_are_here():
    facts = H200.to_dict()
    assert Device.from_dict(facts | {"triton": "1.0", "compiler": "V1"}) == H200
    for wrong in ({}, facts | {"processors": "many"}, facts | {"more": 1}, {**facts, "arch": None}):
        with pytest.raises(InvalidValueError, match="is not of a GPU"):
            Device.from_dict(wrong)


class FirstCall:
    """A first call as `prepared` makes it, but for the GPU: it compiles, or finds in memory, one kernel."""

    def __init__(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        monkeypatch.setattr(running.devices, "gpu", lambda index: H200)
        monkeypatch.setattr(running, "_candidates", lambda call, device: [turned(32, 32)])
        monkeypatch.setattr(running, "fixed", lambda call: None)
        monkeypatch.setattr(launch, "prepare", self.compile)
        self.problem, self.tensors, self.index = TURN, (torch.empty(0),), object()

    def compile(self, call, config, spare):
        with offline.compiling_for(H200, self.index):
            return [compiled() for compiled in ahead.compiles_for(TURN, config, H200)]

    def __call__(self, mode):
        with tritile.mode(mode):
            return running.prepared(self)


@pytest.fixture
def first_call(monkeypatch, tmp_path):
    return FirstCall(monkeypatch, tmp_path)


def test_a_strict_call_compiles_nothing_and_raises(first_call, tmp_path):
    for _ in range(2):
        with compiles_heard() as seconds, pytest.raises(NotCompiledError) as caught:
            first_call("strict")
        assert seconds == []
    for told in (TURN.label, "NVIDIA H200", str(turned(32, 32)), "`tritile compile`", "`tritile.warm`"):
        assert told in str(caught.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert knobs.cache.manager_class is None


def test_a_strict_call_takes_what_is_in_memory_or_on_disk(first_call):
    first_call("cached")
    assert len(first_call("strict")) == 1
    first_call.index = object()  # as in a new process: found on disk
    assert len(first_call("strict")) == 1
    first_call.index = object()
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        with pytest.raises(NotCompiledError):
            first_call("strict")


def test_where_triton_may_not_write_a_strict_call_says_what_is_missing(first_call, tmp_path):
    (tmp_path / "triton").write_text("no folder")
    with pytest.raises(NotCompiledError, match="is not compiled") as caught:
        first_call("strict")
    assert isinstance(caught.value.__cause__, OSError)


def test_what_cannot_be_compiled_ahead_is_not_advised_to_be(first_call, monkeypatch):
    monkeypatch.setattr(running, "fixed", lambda call: turned(32, 32))
    with pytest.raises(NotCompiledError, match=r"compiled: call it once in another mode$"):
        first_call("strict")


def test_other_modes_compile(first_call):
    assert all(first_call(mode) for mode in ("cached", "off", "tune"))


def test_a_listener_of_the_users_goes_on_hearing(monkeypatch, tmp_path):
    heard = []

    def listener(**told):
        heard.append((told["src"].name, told["cache_hit"]))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    with compiles_heard(), offline.compiling_for(H200, object()):
        [compiled() for compiled in ahead.compiles_for(TURN, turned(32, 32), H200)]
    assert heard == [("permute_tile", False)]
    assert knobs.compilation.listener is listener


def test_a_listener_set_meanwhile_stays_and_what_fails_puts_it_back(monkeypatch):
    monkeypatch.setattr(knobs.compilation, "listener", None)
    with pytest.raises(TuningError), compiles_heard():
        raise TuningError("not this one")
    assert knobs.compilation.listener is None
    later = MagicMock()
    with compiles_heard():
        knobs.compilation.listener = later
    assert knobs.compilation.listener is later


def test_compiles_of_other_threads_are_not_counted():
    times = triton.knobs.CompileTimes(1_000_000, [("ptx", 500_000)], 0)
    with compiles_heard() as seconds:
        hear = knobs.compilation.listener
        other = threading.Thread(target=lambda: hear(cache_hit=False, times=times))
        other.start()
        other.join()
        assert seconds == []
        hear(cache_hit=True, times=times)
        hear(cache_hit=False, times=times)
        assert seconds == [1.5]


def test_a_split_call_compiles_each_of_its_parts():
    """A batch of more programs than one launch counts is launched in parts, whose sizes are their own."""
    problem = PermuteProblem.turned(2**23, 256, 256, 1)
    with offline.compiling_for(H200):
        parts = list(ahead.compiles_for(problem, turned(16, 16), H200))
    assert len(parts) > 1
    assert torch.iinfo(torch.int32).max < 2**23 * 16 * 16 <= len(parts) * torch.iinfo(torch.int32).max


def test_all_numbers_of_rows_of_a_weight():
    """Every row count finds its kernel among those of the entries: a folder of these is all that is asked."""
    case = Case("rows", "matmul", "bfloat16", "NT", m=1, n=320, k=192)
    entries = list(rows.of_rows(case.problem, range(1, 701), H200))
    assert len(entries) < 40
    kernels = {}
    for problem, config in entries:
        kernels.setdefault(config, set()).add(rows._compiled(problem, config, H200))
    for m in (1, 2, 16, 33, 64, 129, 256, 300, 512, 640, 699, 700):
        plan = plans.plan_for(replace(case, m=m).problem, H200, "cached")
        assert rows._compiled(plan.problem, plan.config, H200) in kernels[plan.config]


def test_kernels_told_apart_are_those_that_triton_tells_apart(tmp_path):
    """Of two sizes with one key, the second compiles nothing."""
    case = Case("rows", "matmul", "bfloat16", "NT", m=1, n=320, k=192)
    same = {}
    for m in range(65, 129):
        problem = replace(case, m=m).problem
        same.setdefault(rows._compiled(problem, tma(), H200), []).append(problem)
    groups = [problems for problems in same.values() if len(problems) > 1]
    assert groups
    with knobs.cache.scope(), offline.compiling_for(H200, object()):
        knobs.cache.dir = str(tmp_path)
        for first, *_, last in groups[:2]:
            with compiles_heard() as seconds:
                [compiled() for compiled in ahead.compiles_for(first, tma(), H200)]
            with compiles_heard() as again:
                [compiled() for compiled in ahead.compiles_for(last, tma(), H200)]
            assert again == []
        assert len(seconds) <= 1


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Give the entries that the command wants of a folder, for a weight at up to 50 rows."""
    found = []
    monkeypatch.setattr(deployment, "check", lambda entries, *rest: found.extend(entries) or fill.Found())

    def ask(*options):
        found.clear()
        command = ["compile", "--weight", "320x192", "--rows", "50", "--check", str(tmp_path), *options]
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, done.output
        return list(found)

    return ask


TARGET = ("--target", "nvidia-h200")


def test_the_command_takes_weights(asked, tmp_path):
    entries = asked(*TARGET, "--layout", "NT")
    assert {(p.n, p.k, p.b_layout, p.epilogue) for p, _ in entries} == {(320, 192, "column", "")}
    assert {p.m for p, _ in entries} <= set(range(1, 51))
    assert CliRunner().invoke(cli.app, ["compile", "--weight", "320", "--check", str(tmp_path)]).exit_code


@pytest.mark.parametrize(("biased", "activation"), [(False, "gelu"), (True, None)])
def test_the_command_takes_linear_layers(asked, biased, activation):
    options = ["--bias"] * biased + ["--activation", activation] * bool(activation)
    entries = asked(*TARGET, "--layout", "NT", *options)
    bias = torch.empty(320, dtype=torch.bfloat16, device="meta") if biased else None
    weight = torch.empty(320, 192, dtype=torch.bfloat16, device="meta")
    wanted = []
    for m in range(1, 51):
        x = torch.empty(m, 192, dtype=torch.bfloat16, device="meta")
        plan = tritile.plan(tritile.linear, x, weight, bias, activation=activation, device=H200)
        wanted.append((plan.problem, plan.config))
    assert {problem for problem, _ in entries} <= {problem for problem, _ in wanted}
    assert compiled(entries) == compiled(wanted)


def compiled(entries):
    return {(config, rows._compiled(problem, config, H200)) for problem, config in entries}


def test_the_command_takes_packed_linear_layers(asked):
    entries = asked(*TARGET, "--op", "linear_quantized", "--layout", "int4/64", "--bias")
    assert {(p.op, p.group_size, p.bias) for p, _ in entries} == {("linear_quantized", 64, True)}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("512x512x512", "--bias"), "for a --weight"),
        (("--weight", "320x192", "--activation", "sine"), "wanted one of relu"),
        (("--weight", "1x192"), "one column is made as one row"),
        (("--weight", "320x192", "--dtype", "int8", "--bias"), "a floating dtype"),
        (("--weight", "320x192", "--op", "linear_quantized", "--activation", "gelu"), "epilogue of bias=row"),
    ],
)
def test_layers_that_there_are_not_are_refused(tmp_path, options, wanted):
    done = CliRunner().invoke(cli.app, ["compile", *TARGET, "--check", str(tmp_path), *options])
    assert done.exit_code == 2
    assert wanted in done.stderr


def test_the_command_plans_by_the_table_that_it_is_given(asked, tmp_path, monkeypatch):
    found, _, _ = gpu_tables.portfolio("halves-nt", H200)
    shipped = asked(*TARGET, "--layout", "NT")
    other = replace(found, configs=found.configs[-2:], constants=found.constants[-2:], correction=None)
    file = tmp_path / "table.json"
    table.write(table.Table(H200.to_dict(), True, families.digests(), (), None, {"halves-nt": other}), file)
    given = asked("--table", str(file), "--layout", "NT")
    # Few rows have configs beside every portfolio.
    assert {config for _, config in given if config.family != "few_rows"} <= set(other.configs)
    assert given != shipped == asked(*TARGET, "--layout", "NT")
    monkeypatch.setenv("TRITILE_TABLE", str(file))
    tritile.forget()
    assert given == asked(*TARGET, "--layout", "NT")
    monkeypatch.delenv("TRITILE_TABLE")
    tritile.forget()


def test_what_is_warmed_is_found(monkeypatch, tmp_path, quick, request):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    whole, *rest = gpu_tables.portfolio(class_of(TURN), H200)
    first = {name: getattr(whole, name)[:4] for name in ("configs", "constants")}
    monkeypatch.setattr(
        gpu_tables, "portfolio", lambda *asked: (replace(whole, **first, correction=None), *rest)
    )
    plans.forget()
    request.addfinalizer(plans.forget)
    plan = tritile.plan(TURN, device=H200)

    def call():
        with compiles_refused("a kernel", "warm it"), offline.compiling_for(H200, object()):
            return [compiled() for compiled in ahead.compiles_for(TURN, plan.config, H200)]

    with pytest.raises(NotCompiledError, match="mode is strict, and a kernel is not compiled: warm it"):
        call()
    made = tritile.warm(TURN, device=H200)
    assert made == len(rows._remembered(TURN, H200)) + 4 + len(model.beside(TURN, H200))
    assert len(call()) == 1
    monkeypatch.setattr(pool, "CompilePool", lambda *_: pytest.fail("compiled again"))
    assert tritile.warm(TURN, device="nvidia-h200") == made


def test_other_threads_compile_where_one_may_not(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []

    def look():
        found.append(knobs.cache.manager_class("KEY").get_group("kernel.json"))

    with compiles_refused("a kernel", "warm it"):
        other = threading.Thread(target=look)
        other.start()
        other.join()
        with pytest.raises(NotCompiledError):
            look()
    assert found == [None]


def test_files_of_a_kernel_that_another_process_writes_stay(tmp_path):
    begun, torn = tmp_path / "BEGUN", tmp_path / "TORN"
    for each in (begun, torn):
        each.mkdir()
        (each / "kernel.ptx").write_text("")
    (torn / "__grp__kernel.json").write_text("{}")
    folder.drop(tmp_path, ["BEGUN", "TORN", "NONE"])
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["kernel.ptx", "kernel.ptx"]
