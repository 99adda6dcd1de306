"""The command line: what each command prints, writes and returns, on a machine without a GPU."""

import contextlib
import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
import typer._completion_classes
from rich.console import Console

import autotune
from tests.commands import commands, refused, run
from tritile import cli, errors
from tritile.choose import aten, gpu_tables, pick, table
from tritile.cli import findings, shared
from tritile.cli import tuning as tune_module
from tritile.core import settings
from tritile.core.config import Config
from tritile.core.device import SHORT, target_device
from tritile.core.distribution import __version__
from tritile.core.problem import KernelProblem, MatmulProblem
from tritile.families import registry as families
from tritile.lab.bench import BenchResult
from tritile.tune import suites
from tritile.tuner.measure.engine import Tuned
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import Store, store_of

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 256, 256, 256, "float16", "float16")
CONFIG = Config.of(family="tile", BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def remember(store, problem=PROBLEM, us=7.5, config=CONFIG, **rest):
    digest = families.FAMILIES[problem.op]["tile"].digest
    store.add(digest, Trial(problem, config, us, measured_utc="2026-01-01T00:00:00+00:00", **rest))


# Each line of arguments in one process, as the command is named that pip installs.
HELP = """
import contextlib, io, json, sys
from tritile.__main__ import main
found = []
for line in json.load(sys.stdin):
    sys.argv, shown = ["tritile", *line], io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main()
    found.append((shown.getvalue(), sorted({"torch", "triton"} & {*sys.modules})))
print(json.dumps(found))
"""


def test_help_is_light_with_examples():
    told = {("--help",): "explain", ("-h",): "merge", ("--version",): "tritile 0.2"}
    told |= {(name, "--help"): f"tritile {name}" for name in commands()}
    how = {"capture_output": True, "text": True, "check": True}
    how["env"] = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", HELP], input=json.dumps([*told]), **how)
    for line, (shown, loaded) in zip(told, json.loads(done.stdout), strict=True):
        assert told[line] in (shown.partition("Examples:")[2] if len(line) > 1 else shown), line
        assert loaded == [], line
    command = [sys.executable, "-X", "importtime", "-m", "tritile", "tune", "--help"]
    assert not re.search(r"\| +(torch|triton)$", subprocess.run(command, **how).stderr, re.MULTILINE)


@pytest.mark.parametrize("name", commands())
def test_examples_of_help_are_taken(name):
    command = commands()[name]
    lines = [line.strip() for line in command.epilog.splitlines() if line.startswith("  ")]
    assert lines
    for line in lines:
        program, first, *arguments = shlex.split(line)
        assert (program, first) == ("tritile", name)
        with command.make_context(name, arguments):  # which ends what --json begins
            pass


def test_examples_of_show_run():
    for line in (each.strip() for each in commands()["show"].epilog.splitlines() if each.startswith("  ")):
        _, *arguments = shlex.split(line)
        elsewhere = [] if "--target" in arguments else ["--target", "h200"]
        found = run(*arguments, *elsewhere)
        assert found.exit_code == 0, (line, found.output)


def test_clear_needs_existing():
    problem = KernelProblem("softmax", (("n", 8),), (("x", "float32"),))
    store_of(H200).add("a" * 16, Trial(problem, CONFIG, 4.0, measured_utc="2026-01-01T00:00:00+00:00"))
    for where in (("--target", "h200"), ("--all",)):
        told = refused("clear", "--kernel", "sofmax", "--yes", *where, status=1)
        assert told.startswith("nothing is remembered of sofmax "), told
        assert told.endswith("(did you mean 'softmax'?): there is softmax")
    assert "1 trial\n" in run("clear", "--kernel", "softmax", "--yes", "--target", "h200").stdout


def test_help_names_torch_modules_values():
    assert tuple(SHORT) == shared.GPUS
    assert {"permute" if op == "transpose" else op for op in shared.OPS} == {*suites.OPS}
    assert list(shared.SUITES) == sorted(path.stem for path in suites.SHIPPED.glob("*.toml"))
    for name in ("tune", "compile"):
        shown = " ".join(run(name, "--help").stdout.split())
        assert all(suite in shown for suite in shared.SUITES), name


def test_a_warning_is_one_line(capsys):
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main(lambda: warnings.warn("of a\nfile", errors.StoreWarning, stacklevel=1))
    assert capsys.readouterr().err == "tritile: StoreWarning: of a file\n"
    assert warnings.showwarning is before


# What is refused: status 2 for wrong usage, 1 for a file that is not there, empty or damaged. A word with =
# before the command sets a variable.
RANK = "WORLD_SIZE=2 RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
USAGE = {
    "tun 8x8x8": "no command 'tun' (did you mean 'tune'?)",
    "tune 8 8": "MxNxK",
    "tune 8x8x8 --dtype int5": "'int5': matmul takes float64, float32, float16",
    "tune 8x8x8 --layout NS": "'NS': matmul takes NN, NT, TN, TT",
    "tune 8x8x8": "there is no GPU here",
    "explain 8x8x8 --target sm_1": "h200 (nvidia-h200), h100 (sm_90), a100 (sm_80)",
    "tune --suite nosuch": "--suite 'nosuch': expected one of batched, deep",
    f"{RANK} tune --calibrate fp8": "are for one process",
    f"{RANK} tune 8x8x8 --json": "are for one process",
    "tune 8x8x8 --output t.json": "--output is for --calibrate",
    "tune --calibrate all --output notes.txt": "notes.txt is not a folder",
    "tune --calibrate nothing": "--calibrate 'nothing': expected one of all, bf16_nn",
    "explain 64 64 0 --target sm_90": "0",
    "explain 64x64x64 --op conv --target sm_90": "conv",
    "explain 8x8x8 --op grouped --target h200": "--op 'grouped': expected one of matmul, transpose",
    "explain 64x64x64 --config 'tile BLOCK_M=5' --target sm_90": "BLOCK_M=5 together with tile",
    "picture.py 4x30x20x15 --op grouped": "--op 'grouped': expected one of matmul, transpose",
    "picture.py 300x200x150 --config 'tile BLOCKS=64'": "BLOCKS",
    "picture.py 300x200x150 --output tiling.pdf": "expected a name that ends in .svg",
    "picture.py 300x200x150 --tile 100000": "tile is 100000",
    "picture.py 300x200x150 --step 0": "step is 0",
    "ladder.py 0": "n = 0: expected 1 to 16,384",
    "ladder.py 8 --op conv": "--op 'conv': expected one of matmul, transpose",
    "bench.py": "there is no GPU here",
    "bench.py --output notes.txt": "notes.txt is not a folder",
    "bench.py --output not/there/x.jsonl": "--output not/there/x.jsonl: expected a folder",
    "bench.py --draw 2": "--draw is for --suite unseen",
    "bench.py --suite unseen --only nothing": "no drawn case has that in its name",
    "report.py --output report.pdf": "expected a name that ends in .html or .svg",
    "show": "there is no GPU here: name one, as --target h200",
    "export --output notes.txt/t.json": "cannot be written",
    "bench 64x64x64": "there is no GPU here",
    "tune --calibrate all --output here --sweeps notes.txt": "notes.txt is not a folder",
    "compile 8x8x8": "there is no GPU here: name one",
    "tune --suite qick": "--suite 'qick' (did you mean 'quick'?)",
    "tune 8x8x8 --op transposed": "--op 'transposed' (did you mean 'transpose'?)",
    "tune --calibrate bf16": "(did you mean 'bf16_n",
    "explain 8x8x8 --target nvidia-h201": "(did you mean 'nvidia-h20",
    "explain 8x8x8 --target ''": "--target '': expected one of h200 (nvidia-h200), h100",
    "tune --suite quick --dtype fp16": "--dtype does not go with --suite: each case of a suite has its own",
    "compile --suite quick --layout TT --target h200": "--layout does not go with --suite",
    "tune --dtype fp16": "--dtype is for shapes",
    "explain 8x8 --op transpose --layout NT": "--layout does not go with --op transpose",
    "compile 8x8x8 --op linear_quantized --layout NT --target h200": "takes one such as int4/128",
    "compile 8x8 --op transpose --any-rows --target h200": "--any-rows is for matmul and linear_quantized",
    "compile 8x8x8 --suite llm --activation silu --target h200": "--activation does not go with --suite",
    "compile --bias --target h200": "--bias is for shapes",
    "explain 8x8x8 --dtype complex64 --target h200": "dtype 'complex64': matmul takes float64",
    "tune --calibrate permute_3": "--calibrate 'permute_3' (did you mean 'permute_",
    "tune 8x8x8 --target h201": "expected one of h200 (nvidia-h200)",
    "tune 8x8x8 --target v100": "for others see the page 'Add my GPU'",
    "tune --model steps:step --suite quick": "--model does not go with --suite: it measures what",
    "tune 8x8x8 --calibrate fp8": "--calibrate does not go with SHAPES: it measures sizes of its own",
    "tune 8x8x8 --target h200 --budget 5": "--target does not go with --budget: nothing is measured",
    "plan 8x8x8 --precision tf23 --target h200": "--precision 'tf23' (did you mean 'tf32'?)",
    "plan 8x8 --op transpose --precision tf32 --target h200": "--precision is for --op matmul",
    "tune 8x8x8 --sweeps here": "--sweeps is for --calibrate",
    "tune 8x8x8 --sizes 200": "--sizes is for --calibrate",
}
FAILURES = {
    "export --target h200": "nothing is remembered of NVIDIA H200: tune it first",
    "clear --kernel nope --target h200 --yes": "nope on NVIDIA H200: nor of any other decorated kernel",
    "report.py missing.jsonl": "no such file",
    "report.py notes.txt": "there are no results",
    "report.py none": "no .jsonl file",
    "merge missing.sqlite3": "missing.sqlite3 does not exist",
    "merge none": "none does not exist, or is not a regular file",
    "merge empty": "empty is not a store",
    "merge other.sqlite3 cut.sqlite3.gz --target h200": "cut.sqlite3.gz is not a store",
    "merge other.sqlite3 --target a100": "trials of NVIDIA H200, not of NVIDIA A100",
    "TRITILE_TABLE=missing.json compile --target h200": "missing.json",
    "TRITILE_TABLE=empty compile --target h200": "empty is not JSON",
    "export --target h200 --output notes.txt": "notes.txt is not JSON",
    "tune --suite no/such.toml": "--suite no/such.toml: no such file",
    "tune --suite broken.toml": "broken.toml",
    "tune --suite ./bare.toml": "bare.toml",
    **{
        f"TRITILE_TABLE={name} {words} --target h200": f"{name} is not JSON"
        for words in ("explain 8x8x8", "show")
        for name in ("notes.txt", "empty")
    },
}


def parsed(words):
    """Return the variables and the arguments of a command line."""
    found = shlex.split(words)
    named = [word.split("=", 1) for word in found if re.match("[A-Z_]+=", word)]
    return dict(named), found[len(named) :]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write files that are empty, damaged or of another kind than wanted."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "notes.txt").write_text("x")
    for name in ("empty", "empty.jsonl", "bare.toml"):
        (folder / name).write_text("")
    (folder / "broken.toml").write_text("[[cases")
    store = Store(H200, folder / "made")
    remember(store)
    (folder / "cut.sqlite3.gz").write_bytes(gzip.compress(store.path.read_bytes())[:-50])
    (folder / "other.sqlite3").write_bytes(store.path.read_bytes())
    return folder


@without_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", [*USAGE, *FAILURES])
def test_wrong_arguments_before_writing(words, inputs, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in inputs.iterdir():
        if path.is_file():
            Path(path.name).write_bytes(path.read_bytes())
    Path("none").mkdir()
    before = sorted(Path().iterdir())
    told, (variables, arguments) = USAGE.get(words) or FAILURES[words], parsed(words)
    assert told in refused(*arguments, status=2 if words in USAGE else 1, env=variables)
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("doctor nothing", 2, "extra argument"),
        ("tune 8x8x8 --dtyp int8", 2, "--dtype"),
        ("merge", 2, "missing argument"),
        ("bench", 2, "missing argument"),
        ("--bogus", 2, "no such option: --bogus"),
        ("TRITILE_TABLE=notes.txt doctor", 1, "notes.txt is not JSON"),
    ],
)
def test_refusals_of_several_lines(words, status, told, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    variables, arguments = parsed(words)
    found = run(*arguments, env=variables)
    assert found.exit_code == status
    assert told in found.output


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ("64 x 48 x 32 --dtype bf16", "64x48x32 NN bfloat16"),
        ("'64 x 48 x 32' --dtype torch.half --layout nt", "64x48x32 NT float16"),
        ("64 48 32 --target 'NVIDIA H100 80GB HBM3'", "64x48x32 NN bfloat16 on NVIDIA H100"),
        ("64 48 32 --target 'RTX 4090'", "64x48x32 NN bfloat16 on NVIDIA GeForce RTX 4090"),
        ("64 48 32 --target sm_90", "64x48x32 NN bfloat16 on NVIDIA H100"),
        ("64 48 32 --target nvidia-h100", "64x48x32 NN bfloat16 on NVIDIA H100"),
        ("64 48 32 --target 'amd instinct mi300x'", "64x48x32 NN bfloat16 on AMD"),
        ("64x48 --op transpose", "48x64 from (1,0) 2-byte"),
    ],
)
def test_shapes_dtypes_gpus_as_typed(words, label, prepared):
    given = shlex.split(words) if "--target" in words else [*shlex.split(words), "--target", "h100"]
    found = run("explain", *given)
    assert found.exit_code == 0, found.output
    assert label in found.stdout


# Commands that print a table; each takes --json.
TABLES = {
    "doctor": "none visible to torch",
    "show --target h200": "bf16_nn",
    "explain 64 48 32 --target H200": "64x48x32",
    "explain 32x32x32": "on NVIDIA H200",
    "ladder.py 8 --op transpose": "row by row",
}
# Commands that write where --output says.
WRITES = (
    "picture.py 30 20 10 --output {}.svg",
    "picture.py 30x20 --op transpose --output {}.svg",
    "export --target h200 --output {}.json",
)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Make what the commands above read, in the working directory."""
    monkeypatch.chdir(tmp_path)
    remember(store_of(H200))


@without_gpu
@pytest.mark.parametrize("words", TABLES)
def test_tables_80_columns_json_clean(words, prepared, monkeypatch):
    monkeypatch.setattr(shared.console, "_force_terminal", True)
    monkeypatch.setattr(shared.console, "width", 80)
    found = run(*shlex.split(words))
    assert found.exit_code == 0, found.output
    assert TABLES[words] in " ".join(found.stdout.split())
    assert "\u2026" not in found.stdout
    monkeypatch.setattr(shared.console, "_force_terminal", None)
    found = run(*shlex.split(words), "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)
    assert not shared.console.stderr


def test_folding_on_terminals_only():
    rows = [{"problem": "x" * 60, "config": "y z " * 30}]
    for terminal, lines in ((False, 3), (True, 5)):
        to = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
        shared.print_table(rows, "a title of " + "many words " * (1 if terminal else 30), to=to)
        assert len(to.file.getvalue().splitlines()) == lines, to.file.getvalue()


@without_gpu
@pytest.mark.parametrize("words", WRITES)
def test_folders_of_an_output_are_made(words, prepared):
    found = run(*shlex.split(words.format("deep/er/made")))
    assert found.exit_code == 0, found.output
    (made,) = Path("deep/er").iterdir()
    assert made.stat().st_size


def test_compile_says_what_is_missing(tmp_path, monkeypatch):
    command = ("compile", "64x64x64", "--target", "h200")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def of(kernels, reasons):
        monkeypatch.setattr("tritile.lab.warm.compile_calls", lambda *how, **also: (kernels, reasons))
        done = run(*command)
        assert done.exit_code == (1 if reasons else 0)
        return done.stdout.splitlines()

    missing = [f"{i}: is not compiled" for i in range(12)]
    assert of({"a"}, [])[-1].endswith(": 1 kernel of 1 problem on NVIDIA H200")
    assert of({"a", "b"}, ["it: spills"])[-1] == "kernels of 1 config do not compile"
    monkeypatch.setenv("TRITILE_MODE", "strict")
    assert of({"a", "b"}, [])[-1].endswith(": 2 kernels of 1 problem on NVIDIA H200, compiled already")
    *listed, rest, found, cure = of(set(), missing)
    assert (listed, rest) == (missing[:10], "... and 2 more")
    assert found.endswith("0 kernels of 1 problem on NVIDIA H200")
    assert cure.startswith("kernels of 12 configs are missing: the same command with TRITILE_MODE=cached")


def test_help_lists_first_sentences():
    shown = " ".join(run("--help").stdout.split())
    for command in commands().values():
        assert " ".join(command.help.split("\n\n")[0].split()) in shown


def completed_by(line):
    """Return what bash is offered at the end of a line."""
    group = typer.main.get_command(cli.app)
    words = line.split(" ")
    complete = typer._completion_classes.BashComplete(group, {}, "tritile", "_TRITILE_COMPLETE")
    return {item.value for item in complete.get_completions(words[1:-1], words[-1])}


def test_shell_completion():
    assert completed_by("tritile ") == set(commands())
    assert completed_by("tritile ex") == {"explain", "export"}
    assert completed_by("tritile merge --t") == {"--target"}
    assert completed_by("tritile tune --op t") == {"transpose"}
    assert completed_by("tritile tune --dtype bf") == {"bf16", "bfloat16"}
    assert completed_by("tritile tune --layout N") == {"NN", "NT"}
    assert completed_by("tritile tune --suite ll") == {"llama", "llm"}
    assert completed_by("tritile run --mode s") == {"spread", "strict"}
    assert completed_by("tritile compile --activation ge") == {"gelu", "gelu_tanh"}
    assert completed_by("tritile explain --target h") == {"h100", "h20", "h200", "h200-nvl", "h800"}


MIXED = """
[[cases]]
op = "matmul"
dtypes = ["float32"]
layouts = ["NN"]
precisions = ["fp16x3", "tf32"]
sizes = ["512x512x512"]

[[cases]]
op = "permute"
dtypes = ["float16"]
sizes = ["64x32"]
dims = [[1, 0]]
"""


def test_tune_for_batch_invariant_calls(tmp_path, monkeypatch):
    tuned = []
    monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "1")
    monkeypatch.setattr(tune_module.devices, "current_gpu", lambda: H200)
    monkeypatch.setattr(tune_module, "tune_here", lambda problems, *how: tuned.extend(problems))
    (tmp_path / "mixed.toml").write_text(MIXED)
    result = run("tune", "--suite", tmp_path / "mixed.toml")
    assert result.exit_code == 0, result.output
    assert "fp16x3: left out" in " ".join(result.output.split())
    assert [problem.invariant for problem in tuned] == [True, False]


def test_show_lists_best():
    store = store_of(H200)
    remember(store)
    remember(store, us=5.25, config=Config.of(family="tile", BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=8))
    result = run("show", "--target", "nvidia-h200")
    assert result.exit_code == 0
    assert "5.2" in result.output
    assert "7.5" not in result.output
    assert "1 measurement of" in result.output
    assert "2 measurements of" in run("show", "--target", "nvidia-h200", "--trials").output


def test_show_decorated_kernels(monkeypatch):
    monkeypatch.setattr(shared.console, "width", 200)
    store, small, large = store_of(H200), Config.of(B=16), Config.of(B=32)

    def add(source, kernel, n, times, day):
        problem = KernelProblem(kernel, (("n", n),), (("x", "float32"),))
        for config, us in times.items():
            failure = None if us else "hung: no answer"
            date = f"2026-01-0{day}T00:00:00+00:00"
            store.add(source * 16, Trial(problem, config, us, failure=failure, measured_utc=date))

    remember(store)
    add("a", "softmax", 64, {small: 5.0, large: 4.0}, 1)
    add("a", "softmax", 128, {small: 5.0, large: 4.0}, 2)
    add("a", "softmax", 256, {small: 6.0, large: 7.0}, 1)
    add("b", "softmax", 64, {small: 9.0}, 3)  # an edited kernel, or another of that name
    add("c", "Model.relu", 64, {small: None}, 1)
    lines = [" ".join(line.split()) for line in run("show", "--target", "h200").output.splitlines()]
    assert "Model.relu cccccccc 1 1 none works 0 2026-01-01" in lines
    assert "softmax aaaaaaaa 3 2 B=32 num_warps=4 num_stages=3 2 2026-01-02" in lines
    assert "softmax bbbbbbbb 1 1 B=16 num_warps=4 num_stages=3 1 2026-01-03" in lines
    assert "softmax n=64 (source aaaaaaaa) 4.0 B=32 num_warps=4 num_stages=3 2026-01-01" in lines
    assert "softmax n=64 (source bbbbbbbb) 9.0 B=16 num_warps=4 num_stages=3 2026-01-03" in lines
    assert any(PROBLEM.label in line for line in lines)

    found = json.loads(run("show", "--target", "h200", "--kernel", "softmax", "--json").output)
    assert [(each["source"], each["problems"], each["wins"]) for each in found["kernels"]] == [
        ("a" * 16, 3, 2),
        ("b" * 16, 1, 1),
    ]
    assert [(each["source"][0], each["us"]) for each in found["remembered"]] == [
        ("a", 4.0), ("a", 4.0), ("a", 6.0), ("b", 9.0),
    ]  # fmt: skip
    only = run("show", "--target", "h200", "--kernel", "Model.relu", "--trials").output
    assert "hung" in only
    assert "1 measurement of" in only
    assert "predicted classes" not in only
    missing = refused("show", "--target", "h200", "--kernel", "nosuch", status=1)
    assert "nothing is remembered of nosuch on NVIDIA H200: there is Model.relu, softmax" in missing


def exported(path, *options):
    return run("export", "--output", path, "--target", "nvidia-h200", *options)


def test_export_keeps_older_table(tmp_path):
    path = tmp_path / "table.json"
    remember(store_of(H200))
    assert exported(path).exit_code == 0
    other = MatmulProblem(1, 512, 512, 512, "float16", "float16")
    lines = json.loads(path.read_text())
    (line,) = lines["entries"]
    lines["entries"] = [line | {"problem": line["problem"] | {"m": 512, "n": 512, "k": 512}}]
    path.write_text(json.dumps(lines))
    assert exported(path).exit_code == 0
    made = table.read(path)
    assert {entry.problem: entry.us for entry in made.entries} == {PROBLEM: 7.5, other: 7.5}


@pytest.mark.parametrize(
    "change", [("kernels", {"matmul/tile": "another version"}), ("device", {"name": "NVIDIA Other"})]
)
def test_export_refuses_to_lose(tmp_path, change):
    path, (part, facts) = tmp_path / "table.json", change
    for size in (256, 512):
        remember(store_of(H200), MatmulProblem(1, size, size, size, "float16", "float16"))
    assert exported(path).exit_code == 0
    lines = json.loads(path.read_text())
    lines[part].update(facts)
    lines["entries"] += [lines["entries"][0] | {"problem": lines["entries"][0]["problem"] | {"m": 1}}]
    path.write_text(json.dumps(lines))
    before, result = path.read_bytes(), exported(path)
    assert result.exit_code == 2
    assert "--replace" in result.stderr
    assert path.read_bytes() == before
    assert exported(path, "--replace").exit_code == 0
    assert len(table.read(path).entries) == 2


def test_merge_adds_another_stores_trials(tmp_path):
    other = Store(H200, tmp_path / "other")
    remember(other)
    result = run("merge", other.path, "--target", "nvidia-h200")
    assert result.exit_code == 0
    assert "1 trial added" in result.output
    digest = families.FAMILIES["matmul"]["tile"].digest
    assert [trial.us for trial in store_of(H200).trials(digest, PROBLEM)] == [7.5]
    zipped = tmp_path / "zipped.sqlite3.gz"
    remember(other, MatmulProblem(1, 512, 512, 512, "float16", "float16"))
    zipped.write_bytes(gzip.compress(other.path.read_bytes()))
    assert "1 trial added" in run("merge", zipped, "--target", "h200").output


def test_clear_forgets_if_confirmed():
    a100, kernel = target_device("a100"), KernelProblem("softmax", (("n", 64),), (("x", "float32"),))
    other = replace(kernel, kernel="relu")
    for device in (H200, a100):
        remember(Store(device))
        for each in (kernel, other):
            Store(device).add("digest", Trial(each, Config.of(B=16), 5.0))
    gpu_tables.calibrated_path(H200, "products").write_text("{}")

    def left(device):
        return [trial.problem for _, trial in Store(device).all_trials()]

    assert "stay: --yes deletes them" in refused("clear", "--target", "h200")
    assert "leave --target away" in refused("clear", "--all", "--target", "h200", "--yes")
    assert left(H200) == [PROBLEM, kernel, other]
    told = " ".join(run("clear", "--kernel", "softmax", "--target", "h200", "--yes").output.split())
    assert told == "the trials of softmax on NVIDIA H200 deleted: 1 trial"
    assert (left(H200), left(a100)) == ([PROBLEM, other], [PROBLEM, kernel, other])
    assert gpu_tables.calibrated_path(H200, "products").exists()
    told = " ".join(run("clear", "--target", "h200", "--yes").output.split())
    assert told == "the trials and predictors on NVIDIA H200 deleted: 2 trials"
    assert (left(H200), len(left(a100))) == ([], 3)
    assert not gpu_tables.calibrated_path(H200, "products").exists()
    assert run("clear", "--all", "--kernel", "relu", "--yes").output.endswith("deleted: 1 trial\n")
    assert left(a100) == [PROBLEM, kernel]
    assert run("clear", "--all", "--yes").output.endswith("deleted: 2 trials\n")
    assert left(a100) == []


@pytest.mark.parametrize("which", [["--all"], ["--target", "h200"], ["--all", "--kernel", "softmax"]])
def test_clear_refuses_what_is_no_folder(tmp_path, monkeypatch, which):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("TRITILE_CACHE_DIR", str(path))
        told = refused("clear", *which, "--yes")
        assert f"the folder of what is remembered, {path} cannot be written: " in told


def test_remembered_but_not_counting(tmp_path):
    other = replace(H200, triton="3.0.0")
    remember(Store(other, tmp_path / "other"))
    store_of(H200).add(
        "0" * 16,
        *Store(other, tmp_path / "other").trials(families.FAMILIES["matmul"]["tile"].digest, PROBLEM),
    )
    why = "trials that do not count: 1 of another version of their kernels"
    assert why in run("show", "--target", "h200").output
    merged = " ".join(
        run("merge", tmp_path / "other" / "nvidia-h200.sqlite3", "--target", "h200").output.split()
    )
    both = f"{why}; 1 of triton 3.0.0, here {H200.triton}"
    assert "1 trial added" in merged
    assert both in merged
    assert refused("export", "--target", "h200", "--output", tmp_path / "t.json", status=1).endswith(
        f"counts here; {both}"
    )
    remember(store_of(H200))
    assert both in " ".join(run("show", "--target", "h200").output.split())
    assert exported(tmp_path / "t.json").exit_code == 0


def test_doctor_runs_kernel_names_cache(tmp_path, monkeypatch):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "none ran: torch computed the product on the CPU" in words
    assert all(name in words for name in ("tritile", __version__, "system", "variables"))
    assert ", writable" in words
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(blocked / "cache"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "TRITILE_CACHE_DIR" in result.output


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("TRITILE_MODE", "fsat", "expected one of cached, tune, spread, strict, off"),
        ("TRITILE_BACKENDS", "tritn", "TRITILE_BACKENDS is 'tritn'"),
        ("TRITILE_BATCH_INVARIANT", "yes", "TRITILE_BATCH_INVARIANT is 'yes'"),
        ("TRITILE_TUNE_BUDGET", "long", "expected a number of seconds above 0"),
        ("TRITILE_TABLE", "no/such/table.json", "TRITILE_TABLE: no/such/table.json does not exist"),
    ],
)
def test_doctor_wrong_setting_no_compiler(variable, value, told):
    found = run("doctor", env={variable: value})
    assert found.exit_code == 1
    words = " ".join(found.output.split())
    assert told in words
    assert "set that variable right" in words
    assert "compiler" not in words


def test_progress_without_a_terminal(monkeypatch):
    """A line now and then; none where there is to be no progress."""
    clock, told = iter(range(0, 100, 4)), []
    monkeypatch.setattr(shared.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(shared.notes, "print", lambda text, **how: told.append(text))
    for shown in (True, False):
        with shared.progress(shown) as bar:
            task = bar.add_task("compiling", total=5)
            for _ in range(5):
                bar.update(task, advance=1)
    assert told == ["compiling: 3 of 5 after 12 s"]


NVIDIA = findings.Machine("580.1", True, "13.0")  # a driver, a GPU, and a torch for it


@pytest.mark.parametrize(
    ("machine", "environ", "why", "advice"),
    [
        (NVIDIA._replace(cuda=""), {}, "build without CUDA", "build of torch with CUDA"),
        (NVIDIA._replace(cuda="", driver="", has_devices=False), {}, "", ""),
        (NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, "is '', which hides", "unset it"),
        (NVIDIA, {"CUDA_VISIBLE_DEVICES": "-1"}, "is '-1', which hides", "unset it"),
        (NVIDIA._replace(has_devices=False), {"CUDA_VISIBLE_DEVICES": "0"}, "container", "--gpus all"),
        (NVIDIA, {}, "no working driver", "580.1 may be too old for CUDA 13.0"),
        (NVIDIA._replace(driver=""), {}, "no working driver", "run nvidia-smi"),
        (NVIDIA._replace(driver="", has_devices=False), {}, "", ""),
        (NVIDIA._replace(driver="", has_devices=False), {"CUDA_VISIBLE_DEVICES": ""}, "", ""),
    ],
)
def test_doctor_says_why_torch_sees_no_gpu(machine, environ, why, advice, monkeypatch):
    found = findings.unseen_gpu(machine, environ)
    assert why in found[0]
    assert advice in found[1]
    assert bool(why) == bool(found[0])
    monkeypatch.setattr(findings.Machine, "here", lambda: machine)
    for name in ("CUDA_VISIBLE_DEVICES", *environ):
        monkeypatch.setenv(name, environ[name]) if name in environ else monkeypatch.delenv(
            name, raising=False
        )
    assert run("doctor").exit_code == bool(why)


def test_doctor_shows_variables_without_passwords():
    environ = {
        "TRITILE_SHARED": "s3://me:secret@bucket/x?key=abc&region=eu",
        "TRITON_CACHE_DIR": "/c",
        "HOME": "/h",
    }
    (found,) = findings._variables(environ)
    assert found.found == "TRITILE_SHARED=s3://***@bucket/x?key=***&region=eu\nTRITON_CACHE_DIR=/c"
    assert findings._variables({})[0].found == "none"


def test_doctor_names_the_triton_that_torch_requires(monkeypatch):
    for required, told in (
        ("triton==3.0.0", "requires triton==3.0.0"),
        ("triton>=3; extra == 'x'", ""),
        ("numpy", ""),
    ):
        monkeypatch.setattr(findings.importlib.metadata, "requires", lambda name, text=required: [text])
        assert told in findings._needed_by_torch()
        assert bool(told) == bool(findings._needed_by_torch())


@pytest.mark.parametrize(
    ("failure", "compilers", "told"),
    [
        (RuntimeError("Failed to find C compiler"), (), "install a C compiler"),
        (RuntimeError("no kernel image"), ("cc",), "driver"),
        (errors.UnsupportedError("not on this GPU"), (), ""),
    ],
)
def test_doctor_advice(failure, compilers, told, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(findings.shutil, "which", lambda name: name if name in compilers else None)

    def fail(*arguments, **words):
        raise failure

    monkeypatch.setattr(findings.matmul_op, "matmul", fail)
    found = run("doctor", "--json")
    assert found.exit_code == 1
    (finding,) = (each for each in json.loads(found.stdout) if each["name"] == "a kernel")
    assert told in finding["advice"]
    assert bool(told) == bool(finding["advice"])


SHAPES = ("299x256x256", "301x256x256", "303x256x256")  # of which no table knows torch's time


@pytest.fixture
def searches(monkeypatch):
    """Act the GPU and the search: the first problem takes 4 us, the next 8, the third fails."""

    def tune(problems, device, shop, keep, rules, force, keep_on):
        for problem, us in zip(problems, (4.0, 8.0, None), strict=False):
            trial = Trial(
                problem, CONFIG, us, error=1e-4, failure=None if us else "compiled to 216 bytes of spills",
                measured_utc="2026-01-01T00:00:00+00:00",
            )  # fmt: skip
            keep(families.FAMILIES["matmul"]["tile"].digest, trial)
            yield Tuned(problem, trial if us else None, 1, 0.5, None if us else "nothing works")

    def time_torch(problem, device, index):
        assert pick.trials(problem, device)
        store_of(device).add(
            TORCH, Trial(problem, aten.CONFIG, 8.0, measured_utc="2026-01-01T00:00:00+00:00")
        )

    monkeypatch.setattr(tune_module.devices, "current_gpu", lambda: H200)
    monkeypatch.setattr(tune_module, "PoolRunner", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(tune_module.now, "tune", tune)
    monkeypatch.setattr(tune_module.now, "time_torch", time_torch)
    monkeypatch.setattr(
        tune_module, "is_tuned", lambda problem, device: any(t.us for t in pick.trials(problem, device))
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_tune_prints_problems_and_torch(searches, terminal, monkeypatch):
    notes = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    monkeypatch.setattr(shared, "notes", notes)
    found = run("tune", *SHAPES, "--dtype", "fp16")
    assert found.exit_code == 1  # for the one that nothing works for
    lines = found.stdout.splitlines()
    assert any(line.startswith("299x256x256 NN float16: 4.0 us, tile BLOCK_K=32") for line in lines)
    assert lines[-2] == "configs that failed: 1 compiled to .. bytes of spills"
    summary = (
        " s: 1.41x as fast as torch (geometric mean), worst 1.00 (301x256x256 NN float16); remembered in"
    )
    assert summary in lines[-1]
    assert "303x256x256 NN float16: nothing works" in notes.file.getvalue()
    assert ("3/3" in notes.file.getvalue()) == terminal


@pytest.mark.parametrize("stopped", [False, True])
def test_tune_json_and_torch_times(searches, stopped, monkeypatch):
    asked = []
    go_on = contextlib.nullcontext(lambda: not stopped)
    monkeypatch.setattr(tune_module, "interruptible", lambda budget: go_on)
    monkeypatch.setattr(tune_module.now, "time_torch", lambda problem, *gpu: asked.append(problem))
    found = run("tune", *SHAPES, "--dtype", "fp16", "--json")
    told = json.loads(found.stdout)
    keys = ("problem", "us", "torch_us", "tried", "failure")
    assert [tuple(each[key] for key in keys) for each in told["problems"]] == [
        ("299x256x256 NN float16", 4.0, None, 1, None),
        ("301x256x256 NN float16", 8.0, None, 1, None),
        ("303x256x256 NN float16", None, None, 1, "nothing works"),
    ]
    assert told["left"] == 1
    assert [problem.m for problem in asked] == ([] if stopped else [299, 301])


def test_tune_says_what_is_lost(searches, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tune_module.now, "time_torch", lambda *given: None)
    with pytest.warns(errors.StoreWarning, match="calls go on without it"):
        found = run("tune", SHAPES[0], "--dtype", "fp16")
    assert "1 trial lost" in found.stdout


def test_silent_without_reader(tmp_path):
    (tmp_path / "tritile").write_text("from tritile.__main__ import main\nmain()")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(tmp_path / "tritile"), "--help"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environ)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


@without_gpu
def test_tune_elsewhere_predicts(monkeypatch):
    remember(store_of(H200))
    found = run("tune", "256x256x256", "999x1001x1003", "--dtype", "fp16", "--target", "h200")
    assert found.exit_code == 0, found.output
    known, predicted, counts, now, then = found.stdout.splitlines()
    assert known.startswith("256x256x256 NN float16: 7.5 us")
    assert re.match(r"999x1001x1003 NN float16: [\d.]+ us, .* \(predicted\)$", predicted)
    assert counts == "NVIDIA H200: 1 measured before, 1 predicted"
    assert now.startswith("nothing was measured now")
    assert "without --target" in then
    assert "TRITILE_TABLE" in then
    assert len(list(store_of(H200).all_trials())) == 1
    found = run("tune", "999x1001x1003", "--dtype", "fp16", "--target", "h200", "--json")
    (problem,) = json.loads(found.stdout)["problems"]
    plan = pick.plan_for(
        suites.parse_shape("999x1001x1003", "matmul", "float16", "NN").problem, H200, "cached", True
    )
    assert (problem["us"], problem["source"]) == (plan.us, plan.source)
    found = run("tune", "4096x4096x4096", "--target", "h200", env={"TRITILE_BACKENDS": "triton,aten"})
    summary = r"^NVIDIA H200: 1 measured before, 0 predicted; [\d.]+x as fast as torch \(geometric mean\)$"
    assert re.search(summary, found.stdout, re.M)


def test_tune_here_measures(searches):
    found = run("tune", SHAPES[0], "--dtype", "fp16", "--target", "h200")
    assert found.stdout.splitlines()[1].startswith("299x256x256 NN float16: 4.0 us, tile")


@pytest.mark.parametrize("words", ["tune 299x256x256 --dtype fp16", "bench 64x64x64"])
def test_missing_pinned_table_ends_early(words, searches, monkeypatch):
    monkeypatch.setattr(tune_module, "PoolRunner", lambda *_, **__: pytest.fail("measures"))
    monkeypatch.setattr("tritile.lab.bench.measured", lambda *_, **__: pytest.fail("measures"))
    environ = {"TRITILE_TABLE": "no/such.json"}
    assert refused(*words.split(), status=1, env=environ).startswith(
        "TRITILE_TABLE: no/such.json does not exist"
    )


def test_bench_both_sides_and_failures(monkeypatch):
    def measured(case, log):
        if case.m == 8:
            raise ValueError("no")
        copy = 2000.0 if case.op == "permute" else None
        return BenchResult(case.problem, H200, 10.0, 9.0, 0.01, 0.0, 0.0, copy, CONFIG, "exact", "matmul")

    monkeypatch.setattr("tritile.core.device.current_gpu", lambda: H200)
    monkeypatch.setattr("tritile.lab.bench.measured", measured)
    found = run("bench", "1000x777x333", "8x8x8")
    assert found.exit_code == 1
    assert "8x8x8 NN bfloat16: ValueError: no" in found.stderr
    assert found.stdout.splitlines()[0] == "1000x777x333 NN bfloat16 on NVIDIA H200"
    shown = " ".join(found.stdout.split())
    assert "torch 9.0 us, 0.90 times as long: matmul" in shown
    assert "rate 51.7 TFLOP/s" in shown
    assert "311 GB/s, 16% of a copy's" in run("bench", "1000x777", "--op", "transpose").stdout
    (line,) = json.loads(run("bench", "64", "64", "64", "--json").stdout)
    told = line["problem"], line["torch_us"], line["ratio"], line["env"]["gpu"]
    assert told == ("64x64x64 NN bfloat16", 9.0, 0.9, "NVIDIA H200")
    assert Config.from_dict(line["config"]) == CONFIG


def test_make_tune_without_gpu(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(autotune, "run", lambda *words: ran.append(words) or 0)
    monkeypatch.setattr(autotune.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    assert autotune.demonstrate() == 0
    assert ran[-1] == ("tune", "--suite", "quick", "--target", "h200")
    assert "`tritile doctor`" in capsys.readouterr().out.splitlines()[-1]


def test_plan_says_what_runs():
    """For a GPU that is not here; what the tables say is for other tests."""
    done = run("plan", "512x8191x4097", "--layout", "NT", "--target", "h100")
    assert all(words in done.stdout for words in ("512x8191x4097 NT", "NVIDIA H100", "config  ", "source  "))
    listed = json.loads(run("plan", "64x64x64", "48x48x48", "--target", "h200", "--json").stdout)
    assert [each["problem"].split()[0] for each in listed["problems"]] == ["64x64x64", "48x48x48"]
    facts = {"config", "source", "us", "other_us", "why", "workspace", "candidates"}
    assert facts <= listed["problems"][0].keys()


def test_doctor_knows_the_variables():
    """It names one that is misspelt; what the code reads it knows."""
    root = Path(cli.__file__).parents[1]
    read = {
        name for path in root.rglob("*.py") for name in re.findall(r"TRITILE_[A-Z_\d]+\b", path.read_text())
    }
    assert read - {"TRITILE_"} <= settings.VARIABLES
    found = findings._variables({"TRITILE_CACHE_DR": "/x", "TRITILE_BATCH_INVARIANT": "torch"})
    assert [each.good for each in found] == [True, False, True]
    assert "did you mean 'TRITILE_CACHE_DIR'" in found[1].found


def test_run_refuses_what_it_cannot_mean(monkeypatch):
    assert "no such option --kernal (did you mean '--kernels'?)" in refused("run", "--kernal", "x", "python")
    assert "(did you mean 'cached'?)" in refused("run", "--mode", "cashed", "python")
    assert "'s.py' is not found: expected `python s.py`" in refused("run", "s.py")
    monkeypatch.setenv("TRITILE_BATCH_INVARIANT", "torhc")
    assert "did you mean 'torch'" in refused("run", "python")


def test_help_is_a_command():
    assert run("help").stdout == run("--help").stdout


@pytest.mark.parametrize("by", ["variable", "file"])
def test_a_missing_table_of_adoption_is_found_before_the_program(by, tmp_path, monkeypatch):
    why = f"there is no table {tmp_path / 'nope.json'}: tritile export --kernel writes one"
    if by == "variable":
        words = ("--table", tmp_path / "nope.json")
        monkeypatch.setenv("TRITILE_ADOPT_TABLE", str(tmp_path / "nope.json"))
    else:
        (tmp_path / "adopt.toml").write_text('table = "nope.json"')
        words = ("--file", tmp_path / "adopt.toml")
        monkeypatch.setenv("TRITILE_ADOPT_FILE", str(tmp_path / "adopt.toml"))
    assert why in [each.found for each in findings._settings()]
    monkeypatch.delenv("TRITILE_ADOPT_TABLE", raising=False)
    assert why in refused("run", *words, "python")
