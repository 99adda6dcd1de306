"""The command line: what each command prints, writes and returns, on a machine without a GPU."""

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import commands, refused, run
from tritile import cli, errors
from tritile.cli import shared
from tritile.cli import tune as tune_module
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.core.settings import tune_log
from tritile.families import registry as families
from tritile.planning import table
from tritile.planning.store import Store, store_of
from tritile.planning.trial import Trial
from tritile.tune import tuner
from tritile.tune.deploy import fill as deployment
from tritile.tune.measure.tasks import logged
from tritile.tune.subject.space import ProblemSpace

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 256, 256, 256, "float16", "float16")
CONFIG = Config.of(family="tile", BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def remember(store, problem=PROBLEM, us=7.5, config=CONFIG, **rest):
    digest = families.FAMILIES[problem.op]["tile"].digest
    store.add(digest, Trial(problem, config, us, measured_utc="2026-01-01T00:00:00+00:00", **rest))


def test_help_lists_each_command_by_the_first_sentence_of_its_own():
    for name, command in commands().items():
        assert " ".join(command.help.split("\n\n")[0].split()) == cli.COMMANDS[name]


SHOWS = """
import atexit, sys
from tritile.__main__ import main
atexit.register(lambda: print({"torch", "triton"} & {*sys.modules}))
main()
"""


@pytest.mark.parametrize(
    ("argument", "told"), [("--help", "picture"), ("-h", "merge"), ("--version", "tritile 0.1")]
)
def test_help_and_version_need_neither_torch_nor_triton(argument, told, tmp_path):
    script = tmp_path / "tritile"  # as the command is named that pip installs
    script.write_text(SHOWS)
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.endswith("set()\n")
    assert told in done.stdout


WHOLE = """
import os, sys
import torch, triton  # once, in seconds
for argv in ([], ["/bin/tritile"], ["/bin/tritile", "--help"], ["/bin/tritile", "tune"]):
    if os.fork() == 0:
        sys.argv = argv
        import tritile
        tritile.matmul, tritile.explain, tritile.__version__
        print("whole", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, argv
"""


def test_the_package_is_whole_however_its_process_was_started():
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", WHOLE], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout.split() == ["whole"] * 4


@without_gpu
@pytest.mark.parametrize("command", ["tune", "bench", "show", "export"])
def test_without_a_gpu_it_says_so_in_one_line(command, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tritile", command])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("tritile: ")
    assert "no GPU here" in error
    assert error.count("\n") == 1


WRONG = {
    "tune 8x8 --target sm_90": "8x8",
    "tune 8x8x8 --dtype int5 --target sm_90": "int5",
    "tune --suite nothing --target sm_90": "nothing",
    "tune 8x8x8 --target sm_1": "sm_1",
    "tune 8x8x8 --strategy fast --target sm_90": "screening",
    "tune 8x8x8 --verify some --target sm_90": "winner, all",
    "tune 8x8x8 --only NT --target sm_90": "'NT'",
    "tune --suites no/such/folder --target sm_90": "no/such/folder",
    "bench --compare missing.jsonl": "missing.jsonl",
    "bench --compare .": "no .jsonl file",
    "report none.jsonl": "no such file",
    "report notes.txt": "wanted results",
    "report .": "no .jsonl file",
    "explain 64 64 --target sm_90": "MxNxK",
    "explain 64 64 0 --target sm_90": "0",
    "explain 64x64x64 --target sm_1": "sm_1",
    "explain 64x64x64 --op conv --target sm_90": "conv",
    "explain 64x64x64 --config 'tile BLOCK_M=5' --target sm_90": "BLOCK_M = 5",
    "picture 300x200": "MxNxK",
    "picture 300x200x150 --op conv": "wanted one of matmul, transpose",
    "picture 300x200x150 --target sm_1": "unknown target 'sm_1'",
    "picture 300x200x150 --config 'tile BLOCK_M=63'": "BLOCK_M = 63",
    "picture 300x200x150 --config 'tile BLOCKS=64'": "BLOCKS",
    "picture 300x200x150 --output tiling.pdf": ".html or .svg or .png",
    "picture 300x200x150 --output no/such/tiling.html": "no folder no/such",
    "picture 300x200x150 --tile 100000": "tile 100000",
    "picture 300x200x150 --step 0": "step 0",
    "ladder 0": "n = 0: wanted 1 to 512",
    "ladder -- -3": "n = -3: wanted 1 to 512",
    "ladder 513": "n = 513: wanted 1 to 512",
    "ladder 8 --op conv": "op 'conv': wanted one of matmul, transpose, both",
    "ladder 8 --target sm_1": "unknown target 'sm_1'",
    "ladder 8 --output no/such/folder/x.json": "no/such/folder/x.json cannot be written",
    "ladder 8 --output x.txt": "x.txt: wanted a name that ends in .json",
    "ladder 8 --plot x.pdf": "x.pdf: wanted a name that ends in .svg or .png or .html",
    "ladder 8 --plot no/such/folder/x.svg": "no/such/folder/x.svg cannot be written",
    "ladder 8 --from x.json": "leave out N",
    "ladder --from no/such/file.json": "no/such/file.json",
    "accuracy --dtype float128": "float128",
    "replay --strategy prayer": "prayer",
    "replay no/such/store.sqlite3": "no/such/store",
    "replay --target sm_80": "no store",
    "replay notes.txt": "no trials of NVIDIA H200",
}


@without_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_named_before_any_work(words, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("notes.txt").write_text("x")
    assert WRONG[words] in refused(*shlex.split(words))
    assert [path.name for path in Path().iterdir()] == ["notes.txt"]


def test_tune_for_a_target_writes_a_predicted_table(tmp_path):
    output = tmp_path / "predicted.json"
    result = run("tune", "512x256x128", "--target", "nvidia-h200", "--output", output, "--jobs", "1")
    assert result.exit_code == 0, result.output
    made = table.read(output)
    assert not made.measured
    assert made.device["name"] == "NVIDIA H200"
    (entry,) = made.entries
    assert (entry.problem.m, entry.problem.n, entry.problem.k, entry.us) == (512, 256, 128, None)


def test_tune_says_what_is_remembered_and_what_is_lost(tmp_path, capsys):
    (tmp_path / "folder").write_text("a file, as of now")
    store = Store(H200, tmp_path / "folder")
    with pytest.warns(errors.StoreWarning, match="tried again"):
        store.add("digest", Trial(PROBLEM, CONFIG, 2.0))
    store.add("digest", Trial(PROBLEM, CONFIG, 1.0))
    tune_module._finish(store)
    assert "1 trials are lost" in capsys.readouterr().out
    (tmp_path / "folder").unlink()
    tune_module._finish(store)
    assert "remembered in" in capsys.readouterr().out
    assert store.best("digest", PROBLEM).us == 1.0


MIXED = """
[[cases]]
op = "matmul"
dtypes = ["float32"]
layouts = ["NN"]
precisions = ["fp16x3", "tf32"]
squares = [512]

[[cases]]
op = "permute"
dtypes = ["float16"]
shapes = [[64, 32]]
dims = [[1, 0]]
"""


@pytest.mark.parametrize("by", ["option", "environment"])
def test_tune_for_batch_invariant_calls(tmp_path, monkeypatch, by):
    monkeypatch.setattr(tuner, "predict", lambda problem, device, pool: (CONFIG, []))
    output, option = tmp_path / "predicted.json", ["--batch-invariant"]
    if by == "environment":
        monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "1")
        option = []
    (tmp_path / "mixed.toml").write_text(MIXED)
    given = ("--target", "nvidia-h200", "--suites", tmp_path, "--suite", "mixed", "--output", output)
    result = run("tune", *given, *option)
    assert result.exit_code == 0, result.output
    assert "fp16x3: left out" in " ".join(result.output.split())
    assert [getattr(e.problem, "invariant", None) for e in table.read(output).entries] == [True, None]


def test_compile_for_batch_invariant_calls(tmp_path, monkeypatch):
    asked = []

    def check(entries, device, folder, at):
        asked.extend(entries)
        return deployment.Found()

    monkeypatch.setattr(deployment, "check", check)
    run("compile", "64x48x32", "--batch-invariant", "--target", "nvidia-h200", "--check", tmp_path)
    assert [problem.invariant for problem, _ in asked] == [True]
    with pytest.raises(errors.InvalidValueError, match="--batch-invariant is for shapes or suites"):
        run("compile", "--batch-invariant", "--target", "h", "--check", tmp_path, catch_exceptions=False)


def test_show_lists_the_best_of_each_problem():
    store = store_of(H200)
    remember(store)
    remember(store, us=5.25, config=Config.of(family="tile", BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=8))
    result = run("show", "--target", "nvidia-h200")
    assert result.exit_code == 0
    assert "5.2" in result.output
    assert "7.5" not in result.output
    assert "1 rows" in result.output
    assert "2 rows" in run("show", "--target", "nvidia-h200", "--trials").output


def test_export_keeps_what_an_older_table_knows(tmp_path):
    path = tmp_path / "table.json"
    remember(store_of(H200))
    assert run("export", path, "--target", "nvidia-h200").exit_code == 0
    other = MatmulProblem(1, 512, 512, 512, "float16", "float16")
    lines = json.loads(path.read_text())
    (line,) = lines["entries"]
    lines["entries"] = [line | {"problem": line["problem"] | {"m": 512, "n": 512, "k": 512}}]
    path.write_text(json.dumps(lines))
    assert run("export", path, "--target", "nvidia-h200").exit_code == 0
    made = table.read(path)
    assert {entry.problem for entry in made.entries} == {PROBLEM, other}
    assert [entry.us for entry in made.entries] == [7.5, 7.5]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines["kernels"].update({"matmul/tile": "another version"}),
        lambda lines: lines["device"].update(name="NVIDIA Other"),
    ],
)
def test_export_does_not_destroy_a_table_that_knows_more(tmp_path, change):
    path = tmp_path / "table.json"
    store = store_of(H200)
    remember(store)
    remember(store, MatmulProblem(1, 512, 512, 512, "float16", "float16"))
    assert run("export", path, "--target", "nvidia-h200").exit_code == 0
    lines = json.loads(path.read_text())
    change(lines)
    lines["entries"] += [lines["entries"][0] | {"problem": lines["entries"][0]["problem"] | {"m": 1}}]
    path.write_text(json.dumps(lines))
    before = path.read_bytes()
    result = run("export", path, "--target", "nvidia-h200")
    assert "--replace" in str(result.exception)
    assert path.read_bytes() == before
    assert run("export", path, "--target", "nvidia-h200", "--replace").exit_code == 0
    assert len(table.read(path).entries) == 2


def test_export_of_nothing_is_refused(tmp_path):
    result = run("export", tmp_path / "table.json", "--target", "nvidia-h200")
    assert "nothing is remembered" in str(result.exception)
    assert not (tmp_path / "table.json").exists()


def test_export_within_a_tolerance_has_fewer_configs(tmp_path):
    other = MatmulProblem(1, 512, 512, 512, "float16", "float16")
    second = Config.of(family="tile", BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
    store, path = store_of(H200), tmp_path / "table.json"
    for problem, config, us in ((PROBLEM, CONFIG, 10.0), (PROBLEM, second, 10.1), (other, second, 20.0)):
        remember(store, problem, us, config, error=1e-4)
    assert run("export", path, "--target", "nvidia-h200").exit_code == 0
    assert {entry.config for entry in table.read(path).entries} == {CONFIG, second}
    assert table.read(path).loss is None
    result = run("export", path, "--target", "nvidia-h200", "--within", "0.02")
    assert result.exit_code == 0, result.output
    assert "1 configs for 2: 1.00% slower at the worst, 0.50% on the mean" in result.output
    made = table.read(path)
    assert {(entry.problem, entry.config, entry.us) for entry in made.entries} == {
        (PROBLEM, second, 10.1),
        (other, second, 20.0),
    }
    assert made.loss == table.Loss(0.02, pytest.approx(0.01), pytest.approx(0.005), 1)
    run("export", path, "--target", "nvidia-h200", "--within", "0.005")
    assert {entry.config for entry in table.read(path).entries} == {CONFIG, second}


def test_replay_prints_a_line_for_each_strategy(tmp_path):
    store = Store(H200, tmp_path / "other")
    space = ProblemSpace(PROBLEM, H200)
    for place, config in enumerate(space.opening(30)):
        digest = families.FAMILIES["matmul"][config.family].digest
        store.add(digest, Trial(PROBLEM, config, 10.0 + place, measured_utc="2026-01-01T00:00:00+00:00"))
    zipped = tmp_path / "zipped.sqlite3.gz"
    zipped.write_bytes(gzip.compress(store.path.read_bytes()))
    result = run("replay", store.path, zipped, "--strategy", "exhaustive", "--strategy", "screening")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    (exhaustive,) = [line for line in lines if "exhaustive" in line]
    assert exhaustive[3::2] == ["30", "2", "0.00", "0.00", "0.00"]
    assert any("screening" in line for line in lines)
    assert "2 problems" in result.output


def test_brackets_in_data_are_no_markup():
    remember(store_of(H200), us=None, failure="PTXASError: see [/a/b]")
    result = run("show", "--target", "nvidia-h200")
    assert result.exit_code == 0, result.output
    assert "[/a/b]" in result.output.replace("\n", "")


def test_merge_adds_another_stores_trials(tmp_path):
    other = Store(H200, tmp_path / "other")
    remember(other)
    result = run("merge", other.path, "--target", "nvidia-h200")
    assert result.exit_code == 0
    assert "1 trials" in result.output
    digest = families.FAMILIES["matmul"]["tile"].digest
    assert [trial.us for trial in store_of(H200).trials(digest, PROBLEM)] == [7.5]
    assert "none" in refused("merge", tmp_path / "none", "--target", "nvidia-h200")


def test_doctor_runs_a_kernel_and_names_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "runs on" in result.output
    assert "not wanted" in result.output  # a library for use_in_torch, by tests
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(blocked / "cache"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "TRITILE_CACHE_DIR" in result.output


def test_the_suites_that_ship_are_found():
    assert {path.stem for path in Path(shared.SUITES).glob("*.toml")} >= {
        "square", "ragged", "llm", "deep", "batched", "transpose", "quick",
    }  # fmt: skip


def test_a_watch_tells_the_best_so_far_and_failures_by_reason():
    watch = tune_module._Watch()
    for us, failure in ((7.5, None), (5.25, None), (None, "hung: no answer in 10 s"), (None, "hung: again")):
        told = watch.told(Trial(PROBLEM, CONFIG, us, failure=failure))
    assert told == f"{PROBLEM.label}: best 5.2 us of 4; failed: 2 hung"


def test_a_log_in_nobodys_home_is_refused(monkeypatch):
    monkeypatch.setenv("TRITILE_TUNE_LOG", "~nosuchuser/log.jsonl")
    with pytest.raises(errors.InvalidValueError, match=r"TRITILE_TUNE_LOG is '~nosuchuser"):
        tune_log()


def test_nothing_is_said_where_nobody_reads_the_output():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tritile", "--help"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_every_trial_is_logged_as_a_line(tmp_path, monkeypatch):
    log, kept = tmp_path / "log.jsonl", []
    keep = logged(lambda digest, trial: kept.append(trial), log)
    keep("a" * 16, Trial(PROBLEM, CONFIG, 7.5, 0.01, 90, 0, 1024, 1e-3))
    monkeypatch.setenv("TRITILE_TUNE_LOG", str(log))
    logged(lambda digest, trial: kept.append(trial))("b" * 16, Trial(PROBLEM, CONFIG, None, failure="hung"))
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["us"], first["registers"], first["shared"], first["kernel"]) == (7.5, 90, 1024, "a" * 16)
    assert Config.from_dict(first["config"]) == CONFIG
    assert (second["us"], second["failure"], second["problem"]["m"]) == (None, "hung", 256)
    assert len(kept) == 2


def test_without_a_search_the_likeliest_are_raced(monkeypatch):
    """What was measured is left alone, and a problem of which nothing runs is told, and counts."""
    raced = []

    def race(problem, device, gpu):
        raced.append((problem.label, device, gpu))
        if problem.n == 512:
            raise errors.TuningError("nothing runs")
        remember(store_of(device), problem)
        return CONFIG

    monkeypatch.setattr(tune_module.devices, "current_gpu", lambda: H200)
    monkeypatch.setattr(tune_module.devices, "current_index", lambda: 1)
    monkeypatch.setattr(tune_module.now, "tuned_now", race)
    found = run("tune", "300x256x256", "--no-search")
    assert found.exit_code == 0, found.output
    assert raced == [("300x256x256 NN bfloat16", H200, 1)]
    found = run("tune", "300x256x256", "300x512x256", "--no-search")
    assert found.exit_code == 1
    assert [label for label, *_ in raced[1:]] == ["300x512x256 NN bfloat16"]
    assert "nothing runs" in found.output


def test_a_command_that_fails_leaves_no_process_behind(monkeypatch):
    closed = []
    monkeypatch.setattr(tune_module.ForkServer, "close", lambda server: closed.append(server))
    found = run("tune", "64x64x64", "--strategy", "guess")
    assert isinstance(found.exception, errors.InvalidValueError)
    assert len(closed) == 1


def test_build_says_where_the_library_is_and_why_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr("tritile.in_torch.building.build", lambda: tmp_path / "crossing.so")
    assert f"{tmp_path}/crossing.so" in run("build").output.replace("\n", "")

    def fail():
        raise errors.UnsupportedError("there is no C++ compiler")

    monkeypatch.setattr("tritile.in_torch.building.build", fail)
    found = run("build")
    assert found.exit_code != 0
    assert isinstance(found.exception, errors.UnsupportedError)
