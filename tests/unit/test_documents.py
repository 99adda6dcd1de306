"""Check README.md and docs/*.md: links, commands, options, names and variables exist, and snippets run."""

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

import tritile
from tests.commands import commands
from tritile import cli
from tritile.planning import gpu_tables
from tritile.planning.classes import MEASURED

ROOT = Path(tritile.__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = {page.name: page for page in (README, *DOCS)}
GENERATED = ("benchmarks.md", "other_gpus.md")
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


def slug(heading):
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def options_of(command):
    """Return the options of a command, those that turn something off among them."""
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_point_to_files_and_headings(name):
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


def test_the_readme_links_every_page():
    assert all(f"(docs/{page.name})" in README.read_text() for page in DOCS)
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", [page.name for page in DOCS])
def test_a_page_begins_with_whom_it_helps(name):
    paragraphs = re.sub("<!--.*?-->", "", PAGES[name].read_text()).split("\n\n")
    first = next(text for text in paragraphs[1:] if text.strip())
    assert first.startswith("This page helps you ")


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_the_command_exists_and_takes_these_options(command):
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


def test_the_page_of_the_command_line_has_every_command():
    text = PAGES["command_line.md"].read_text()
    assert all(f"`tritile {name}" in text for name in COMMAND)


def test_options_exist():
    known = {"--help"}.union(*map(options_of, COMMAND.values()))
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
    folders = ("tritile", "tuning", "tests", "docs")
    paths = [code for code in INLINE if re.fullmatch(rf"(?:{'|'.join(folders)})/[\w./*-]+", code)]
    assert paths
    written = "tritile/families/naive/"  # docs/kernels.md has its readers write these
    known = [path for path in paths if "GPU" not in path and not path.startswith(written)]
    assert [path for path in known if not list(ROOT.glob(path.rstrip("/")))] == []


def test_names_of_tritile_exist():
    code = "\n".join((*LINES, *INLINE))
    names = set(re.findall(r"(?<![\w/.@])tritile((?:\.[A-Za-z_]\w*)+)(?!\w*/)", code))
    for name in names - {
        ".families.naive",
        ".families.naive.kernel",
    }:  # which docs/kernels.md has its readers write
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


def test_variables_exist_and_the_page_of_the_environment_has_them():
    assert set(re.findall(r"TRITILE_[A-Z_]+", TEXT)) <= variables("tritile", "tuning", "tests/browser")
    listed = set(re.findall(r"^\| `(TRITILE_[A-Z_]+)", PAGES["environment.md"].read_text(), re.MULTILINE))
    assert variables("tritile", "tuning") <= listed


def test_the_page_on_tuning_says_which_portfolios_ship():
    shown = {}
    for names, _, *cells in re.findall(
        r"^\| (`.*`) \| (.*) \| (.*) \| (.*) \|$", PAGES["tuning.md"].read_text(), re.M
    ):
        shown |= dict.fromkeys(re.findall(r"`([a-z0-9-]+)`", names), cells)
    told = {"measured": "measured for this GPU", "predicted": "predicted for this GPU"}
    told["the H200's"] = "measured for NVIDIA H200, which is like it"
    told["the H100's"] = "measured for NVIDIA H100 80GB HBM3, which is like it"
    for name in MEASURED:
        for target, cell in zip(("nvidia-h200", "sm_90"), shown[name], strict=True):
            assert gpu_tables.portfolio(name, tritile.target_device(target))[2] == told[cell], name


@pytest.mark.parametrize("name", [name for name in PAGES if name not in GENERATED])
def test_measured_figures_stand_in_the_generated_pages_alone(name):
    text = PAGES[name].read_text()
    assert re.findall(r"\d\.\d+ (?:times|of cuBLAS|of torch|ms|us|s)\b|\d (?:TB/s|GB/s|TFLOP/s)", text) == []


@pytest.mark.parametrize("name", ["README.md", "tuning.md", "use_in_torch.md"])
def test_the_snippets_run(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGES[name].read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "snippets.py"  # a kernel is read from a file
    script.write_text("\n".join(snippets).replace('device="cuda"', 'device="cpu"'))
    runpy.run_path(str(script))
