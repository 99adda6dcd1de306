"""The documents: links, commands, options, names and variables exist, snippets and examples run."""

import importlib
import itertools
import json
import logging
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import typer

import tritile
from tests.commands import commands, run, scripts
from tritile import cli
from tritile.choose import gpu_tables, predictor, table
from tritile.choose.classes import MEASURED
from tritile.core.problem import MatmulProblem
from tritile.lab import warm
from tritile.lab.tune import tune
from tritile.tuner.store import tables as kernel_table

ROOT = Path(tritile.__file__).parents[1]
README = ROOT / "README.md"
FOLDER = ROOT / "docs"
DOCS = sorted(FOLDER.rglob("*.md"))
TOP = [README, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PAGES = {page.name: page for page in TOP} | {page.relative_to(FOLDER).as_posix(): page for page in DOCS}
TEXT = "\n".join(page.read_text() for page in PAGES.values())
FENCES = re.findall(r"^```\w*[^\n]*\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
INLINE = [
    " ".join(code.split())
    for code in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S))
]
LINES = [re.sub(r"\s#\s.*", "", line) for fence in FENCES for line in fence.splitlines()]
COMMANDS = [
    found[1]
    for line in (*LINES, *INLINE)
    if (found := re.match(r"(?:.* )?(?:-m |^)tritile (.*)$", line.removeprefix("RUN ")))
]
COMMAND = commands()
SCRIPT = scripts()
OF_SCRIPTS = [
    (found[1], found[2])
    for line in (*LINES, *INLINE)
    if (found := re.match(rf"python tuning/({'|'.join(SCRIPT)}) ?(.*)$", line))
]


def slug(heading):
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def options_of(command):
    """Return the options of a command, those that turn something off among them."""
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("name", PAGES)
def test_links_point_to_headings(name):
    page = PAGES[name]
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), link


def test_every_page_listed_once():
    pages = [page.relative_to(FOLDER).as_posix() for page in DOCS]
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    linked = README.read_text() + PAGES["api.md"].read_text().replace("(api/", "(docs/api/")
    assert [page for page in (*TOP[1:], *DOCS) if f"({page.relative_to(ROOT)})" not in linked] == []


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_command_takes_these_options(command):
    name, *arguments = shlex.split(command)
    if "--help" in arguments:
        arguments.remove("--help")
    if name.startswith("-"):
        assert name in options_of(typer.main.get_command(cli.app))
        return
    assert name in COMMAND
    if len(arguments) == 1 and arguments[0].startswith("--"):
        assert arguments[0] in options_of(COMMAND[name])
    elif arguments:  # alone it names the command, whose arguments may be missing
        COMMAND[name].make_context(name, arguments)


@pytest.mark.parametrize(("name", "arguments"), dict.fromkeys(OF_SCRIPTS))
def test_the_script_takes_these_options(name, arguments):
    words = shlex.split(arguments)
    if len(words) == 1 and words[0].startswith("--"):
        assert words[0] in options_of(SCRIPT[name])
    elif words:
        SCRIPT[name].make_context(name, words)


# Commands that need no GPU; tests/gpu/test_pages_gpu.py runs others, and the one that compiles for a minute.
OFFLINE = re.compile(
    r"tritile doctor|tritile explain .*--target .*"
    r"|python tuning/ladder\.py .*--target .*|python tuning/(picture|report)\.py .*"
)
RUN = [line for line in dict.fromkeys(map(str.strip, LINES)) if OFFLINE.fullmatch(line)]
RUN = [line for line in RUN if "naive" not in line]  # which docs/kernels.md has its readers write


@pytest.mark.parametrize("line", RUN)
def test_commands_run_without_a_gpu(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*shlex.split(re.sub(r"tritile |python tuning/", "", line)))
    assert found.exit_code == 0, found.output


def test_options_exist():
    known = {"--help"}.union(*map(options_of, (*COMMAND.values(), *SCRIPT.values())))
    scripts = "".join(path.read_text() for path in (ROOT / "tuning").glob("*.py"))
    options = {found[0] for code in INLINE if (found := re.match(r"--[a-z][\w-]*", code))}
    assert {option for option in options - known if f'"{option}"' not in scripts} == set()


def test_scripts_and_targets_of_make_exist():
    code = "\n".join((*LINES, *INLINE))
    scripts = re.findall(r"python (\S+/\S+\.py)", code)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make ([\w-]+)", code, re.MULTILINE))
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()


def test_paths_exist():
    folders = ("tritile", "tuning", "tests", "docs", "examples")
    paths = [code for code in INLINE if re.fullmatch(rf"(?:{'|'.join(folders)})/[\w./*-]+", code)]
    assert paths
    written = "tritile/families/naive/"  # docs/kernels.md has its readers write these
    known = [path for path in paths if "GPU" not in path and not path.startswith(written)]
    assert [path for path in known if not list(ROOT.glob(path.rstrip("/")))] == []


def test_names_of_tritile_exist():
    code = "\n".join((*LINES, *INLINE))
    names = set(re.findall(r"(?<![\w/.@])tritile((?:\.[A-Za-z_]\w*)+)(?!\w*/)", code))
    # docs/kernels.md has its readers write the first two, the last is a logger
    for name in names - {".families.naive", ".families.naive.kernel", ".compile"}:
        found, path = tritile, "tritile"
        for part in name.strip(".").split("."):
            path += f".{part}"
            if not hasattr(found, part):
                importlib.import_module(path)
            found = getattr(found, part)


def variables(*folders):
    """Return the variables of tritile that code names, but the one of a shell's completion."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {name for path in files for name in re.findall(r"(?<!_)TRITILE_[A-Z_]+", path.read_text())}


def test_variables_exist_and_are_listed():
    assert set(re.findall(r"TRITILE_[A-Z_]+", TEXT)) <= variables("tritile", "tuning", "tests/browser")
    listed = set(re.findall(r"^\| `(TRITILE_[A-Z_]+)", PAGES["environment.md"].read_text(), re.MULTILINE))
    assert variables("tritile", "tuning") <= listed


def test_each_file_names_one_version():
    assert f"\nversion: {tritile.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'\nversion = "{tritile.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    (day,) = re.findall(
        rf"^## {tritile.__version__} \((.*)\)$", PAGES["CHANGELOG.md"].read_text(), re.MULTILINE
    )
    assert f"\ndate-released: {day}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"at {tritile.__version__}" in README.read_text()
    assert f"version {tritile.__version__}" in PAGES["stability.md"].read_text()


def test_stability_names_formats():
    of_kernels = kernel_table.FORMAT.split()[-1]
    wanted = f"| tables | format {table.FORMAT}, and format {of_kernels} of decorated kernels"
    assert wanted in PAGES["stability.md"].read_text()


def test_tuning_page_shipped_predictors():
    """Classes, the GPUs whose sweeps are committed, and what picks lose by the files that ship."""
    cells = r"^\| `(\w+)` \|[^|]*\| ([^|]*) \| (\d+) \| ([\d.%]+) \| ([\d.%]+) \| ([\d.%]+) \| ([\d.%]*) ?\|$"
    shown = {name: rest for name, *rest in re.findall(cells, PAGES["tuning.md"].read_text(), re.MULTILINE)}
    assert [*shown] == [*MEASURED]
    folders = {"H200": ROOT / "tuning" / "sweeps", "H100": ROOT / "tuning" / "sweeps" / "h100"}
    for name, rest in shown.items():
        what = gpu_tables.what_of(name)
        made = predictor.read(ROOT / "tritile" / "tables" / f"{what}.predictor.json")
        loss = made.classes[name].loss
        swept = [gpu for gpu, folder in folders.items() if (folder / f"{name}.jsonl.gz").exists()]
        losses = [f"{share:.1%}" for share in (loss.mean, loss.p95, loss.by_time)]
        by_torch = f"{loss.torch:.1%}" if loss.torch else ""
        assert rest == [", ".join(swept), str(loss.sizes), *losses, by_torch], name


def test_tuning_page_gpus_that_predictors_serve():
    def served(target):
        return {name for name in MEASURED if gpu_tables.predictor(name, tritile.target_device(target))}

    for target in ("h200", "h100", "gh200", "h800", "h20"):
        assert served(target) == {*MEASURED}
    for target in ("a100", "l40s", "4090", "b200", "mi300x"):
        assert served(target) == set()


def test_reference_pages_complete():
    assert all(f"`tritile {name}" in PAGES["command_line.md"].read_text() for name in COMMAND)
    known = {name for name, found in vars(tritile.errors).items() if isinstance(found, type)}
    rows = re.findall(r"^\| `(\w+)` \|", PAGES["errors.md"].read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(known)
    text = "\n".join(page.read_text() for name, page in PAGES.items() if name.startswith("api/"))
    elsewhere = {"TritileError", "errors", "nn", "tune"}  # on the page of errors, and folders
    missing = {name for name in tritile.__all__ if not re.search(rf"^::: tritile\.{name}$", text, re.M)}
    assert missing <= elsewhere
    assert all(f"\n::: tritile.{name}" in text for name in ("lab.tune.tune\n", "nn."))
    index = PAGES["api.md"].read_text()
    assert {name for name in tritile.__all__ if f"`{name}`" not in index} <= elsewhere - {"tune"}


ENTRIES = {  # of the API pages: what a reader sees as its name, and where the source has it
    (name, heading or path): path
    for name in PAGES
    if name.startswith("api/")
    for path, heading in re.findall(
        r"^::: (\S+)$(?:\n    options:\n      heading: (\S+)$)?", PAGES[name].read_text(), re.MULTILINE
    )
}


def annotated(found):
    """Return the words in the annotations of a function, or of a class's fields, properties and methods."""
    members = [found, *vars(found).values()] if isinstance(found, type) else [found]
    functions = [getattr(one, "fget", getattr(one, "__func__", one)) for one in members]
    annotations = [one for each in functions for one in getattr(each, "__annotations__", {}).values()]
    return {word for one in annotations for word in re.findall(r"\w+", str(one))}


def reached(entries):
    """Return the types among entries that exported names take or return, or that such a type leads to."""
    types = {shown: pkgutil.resolve_name(path) for (_, shown), path in entries.items() if "." not in shown}
    exported = [getattr(tritile, name) for name in tritile.__all__]
    exported += [getattr(tritile.nn, name) for name in tritile.nn.__all__]
    words = set().union(*map(annotated, (*exported, tune, tritile.batch_invariant.report)))
    found = set()
    while new := (words & types.keys()) - found:
        found |= new
        words |= set().union(*(annotated(types[name]) for name in new))
    return found


def private(entries):
    """Return what entries show that is neither exported nor a type that exported names take or return."""
    wrong, types = [], reached(entries)
    for (page, shown), path in entries.items():
        found = pkgutil.resolve_name(path)
        first, *rest = shown.removeprefix("tritile.").split(".")
        if shown.startswith("tritile."):
            known = tritile.nn.__all__ if first == "nn" else tritile.__all__
            exported = (rest[0] if first == "nn" and rest else first) in known
            is_public = exported and pkgutil.resolve_name(shown.replace(".", ":", 1)) in (found, tritile.tune)
        else:
            is_public = shown in types and isinstance(found, type) and found.__name__ == shown
        module = getattr(found, "__module__", None) or found.__name__
        if not is_public or not module.startswith("tritile") or "._" in path:
            wrong.append((page, shown))
    return wrong


def test_api_pages_show_public_names():
    assert private(ENTRIES) == []
    config = (ROOT / "mkdocs.yml").read_text()
    assert 'filters: ["!^_"]' in config
    listed = re.findall(r"members: \[(.*)\]", "".join(PAGES[name].read_text() for name, _ in ENTRIES))
    assert not [name for names in listed for name in names.split(", ") if name.startswith("_")]


@pytest.mark.parametrize(
    ("shown", "path"),
    [
        ("tritile.core.problem.MatmulProblem", "tritile.core.problem.MatmulProblem"),  # no path to rely on
        ("Family", "tritile.families.family.Family"),  # nothing exported returns it
        ("Tensor", "torch.Tensor"),
        ("did_you_mean", "tritile.errors.did_you_mean"),
        ("tritile.import_module", "tritile.import_module"),
        ("tritile.plan", "tritile.explain"),
    ],
)
def test_api_pages_private_names_fail(shown, path):
    assert private(ENTRIES | {("api/choice.md", shown): path}) == [("api/choice.md", shown)]


def test_ladder_page_committed_ratios():
    readings = json.loads((ROOT / "tuning" / "results" / "nvidia-h200" / "ladder.json").read_text())[
        "readings"
    ]
    steps = {(one["op"], one["name"]): one["us"] for one in readings if not one["name"].startswith("torch")}
    requested = {(one["op"], one["name"]): one["requested"] for one in readings}
    product, transpose = PAGES["ladder.md"].read_text().split("## Product")[1].split("## Transpose")
    shown = []
    for op, text in (("matmul", product), ("transpose", transpose)):
        cell = r"([\d.]*) ?\|\s"
        rows = re.findall(rf"^\| ([\w ,.]+) \| {cell}{cell}{cell}{cell}", text, re.MULTILINE)
        shown += [(op, name) for name, *_ in rows]
        times = [steps[op, name] for name, *_ in rows]
        ratios = [f"{before / after:.1f}" for before, after in itertools.pairwise(times)]
        assert ["", *ratios] == [row[1] for row in rows]
        for (name, _, ms, *traffic), us in zip(rows, times, strict=True):
            bytes_ = requested[op, name]
            assert ms == f"{us / 1e3:.2f}"
            assert traffic == ([f"{bytes_ / 1e9:.1f}", f"{bytes_ / us / 1e6:.2f}"] if bytes_ else ["", ""])
    assert shown == [*steps]


SNIPPETS = [name for name in PAGES if re.search(r"^```python$", PAGES[name].read_text(), re.MULTILINE)]
SNIPPETS.remove("guides/own_kernel.md")  # whose kernel test_own_kernels interprets


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_snippets_run(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "prometheus_client", MagicMock())  # which tritile does not depend on
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGES[name].read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "snippets.py"  # a kernel is read from a file
    script.write_text("\n".join(snippets).replace('"cuda"', '"cpu"'))
    done = runpy.run_path(str(script))
    if "Metrics" in done:  # the page on observability
        logger = logging.getLogger("tritile")
        (handler,) = (each for each in logger.handlers if isinstance(each, done["Metrics"]))
        try:
            tritile.forget()
            tritile.plan(MatmulProblem(1, 64, 64, 64, "bfloat16", "bfloat16"), device="sm_80")
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        done["PLANS"].labels.assert_called_once_with("model")


# docs/kernels.md, followed as it stands in a copy of the package.

KERNEL = re.findall(
    r"^```(?:python|text) (\w+)=?(\S*)\n(.*?)^```$", PAGES["kernels.md"].read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture
def stranger(tmp_path):
    """A copy of the package with the page's folder and its one line."""
    base = tmp_path / "stranger"
    shutil.copytree(ROOT / "tritile", base / "tritile", ignore=shutil.ignore_patterns("__pycache__"))
    written = []
    for kind, file, text in KERNEL:
        if kind == "file":
            (base / file).parent.mkdir(exist_ok=True)
            (base / file).write_text(text)
            written.append(file)
        elif kind == "line":
            registry = base / file
            lines = registry.read_text()
            assert text.strip() not in lines
            lines = lines.replace("\n)\nFAMILIES", f"\n{text})\nFAMILIES", 1)
            lines = lines.replace(
                "from tritile.families.permute", "from tritile.families.naive import family as naive\n"
                "from tritile.families.permute", 1
            )  # fmt: skip
            registry.write_text(lines)
    assert {Path(file).parent.as_posix() for file in written} == {"tritile/families/naive"}
    return base


# The page's tests, interpreted, in a fork; meanwhile what all that asks the registry knows of the kernel.
CODE = """
import os, sys, warnings
import torch  # once, in seconds
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os.environ["TRITON_INTERPRET"] = "1"
    exec(open("page.py").read(), {})
    os._exit(0)
import tritile
from tritile.__main__ import main
from tritile.core.problem import MatmulProblem
from tritile.families.registry import digests
from tritile.families.space import illegal, legal_configs
from tritile.families.naive.family import CONFIGS
from tritile.choose import waves
problem = MatmulProblem(1, 512, 512, 512, "float16", "float16")
device = tritile.target_device("nvidia-h200")
assert len(digests()["matmul/naive"]) == 16
assert set(legal_configs(problem, device, "naive")) == set(CONFIGS)
assert "naive" in waves.families(problem, device)
for m, n, k in ((300, 200, 48), (20, 20, 4), (1, 4096, 32), (512, 512, 512)):
    assert waves.pick(MatmulProblem(1, m, n, k, "float32", "float32"), device).family != "naive"
batch = MatmulProblem(2, 8, 8, 8, "float16", "float16")
assert "one matrix" in illegal(CONFIGS[0], batch, device)
assert os.waitpid(child, 0)[1] == 0
config = "naive BLOCK_M=32 BLOCK_K=32"
sys.argv = ["tritile", "explain", "512", "512", "512", "--config", config, "--target", "nvidia-h200"]
main()
"""


def test_kernels_page_runs(stranger):
    """All that asks the registry knows its kernel."""
    (stranger / "page.py").write_text("".join(text for kind, _, text in KERNEL if kind == "run"))
    env = os.environ | {"PYTHONPATH": str(stranger), "TRITILE_CACHE_DIR": str(stranger / "cache")}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=stranger, env=env)
    assert done.returncode == 0, done.stderr
    assert "naive BLOCK_K=32 BLOCK_M=32" in done.stdout
    assert " per thread" in done.stdout  # its registers: it compiled


# Each script of examples/ at its small size, in this process.

SAID = {
    "container": "compiled, checked and planned",
    "llama": "0 of 11 linear layers exchanged",
    "mixture_of_experts": "relative error",
    "quantized_layer": "24768 bytes became 6720",
    "rms_norm": "5x300 runs with BLOCK",
    "server": "4 of 4 requests by tritile",
    "two_gpus": "skipped: needs two GPUs, 0 here",
}


def test_every_example_is_run():
    scripts = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == SAID.keys()


class Thread(ThreadPoolExecutor):
    """Stands for the processes of a WorkerPool, which import torch first."""

    def __init__(self):
        super().__init__(1)

    def submit(self, function, *arguments, limit_s):
        return super().submit(function, *arguments)


def _here(run_process):
    """Return `subprocess.run`, but for `tritile` itself, which this process runs: it has torch already."""

    def ran(command, **words):
        if command[:3] != [sys.executable, "-m", "tritile"]:
            return run_process(command, **words)
        done = run(*command[3:], env=words["env"])
        assert done.exit_code == 0, done.output
        return done

    return ran


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs at real size on a GPU: start the scripts by hand")
@pytest.mark.parametrize("name", [name for name in SAID if name != "rms_norm"])  # see test_own_kernels
def test_it_runs_without_a_gpu(name, capsys, monkeypatch):
    script = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setattr("subprocess.run", _here(subprocess.run))
    monkeypatch.setattr(warm, "WorkerPool", Thread)
    runpy.run_path(str(script), run_name="__main__")
    assert SAID[name] in capsys.readouterr().out
