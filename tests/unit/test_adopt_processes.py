"""Adoption without a line of Python: `tritile run`, what it starts, and what stays as it was."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import tritile
from tritile.cli.run import environment
from tritile.errors import InvalidValueError

pytestmark = pytest.mark.interpreted
ROOT = Path(tritile.__file__).parents[1]
SITE = Path(tritile.__file__).parent / "tuner" / "startup"
LIBRARY = """
import sys, torch, triton, triton.language as tl

def bench(call, quantiles=None):
    call()
    return [1.0] * 3

@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 32)], key=["n"], do_bench=bench)
@triton.jit
def add_one(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

def main():
    imported = "tritile.tuner.autotuner" in sys.modules
    x, out = torch.arange(40.0), torch.zeros(40)
    add_one[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, out, 40)
    assert (out == x + 1).all()
    print("adopted" if "tritile.tuner.adopted" in sys.modules else "Triton's", "early" * imported, flush=True)

if __name__ == "__main__":
    main()
"""
CHILDREN = """
import multiprocessing, subprocess, sys, library
from concurrent.futures import ProcessPoolExecutor

if __name__ == "__main__":
    library.main()
    for how in ("spawn", "fork", "forkserver"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
            pool.submit(library.main).result()
    subprocess.run([sys.executable, "library.py"], check=True)
"""


@pytest.fixture
def started(tmp_path):
    """Run Python with arguments in a folder with a library; return what it printed and wrote to stderr."""
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "children.py").write_text(CHILDREN)

    def started(*arguments, path=(), **variables):
        environ = {
            n: v for n, v in os.environ.items() if not n.startswith(("TRITILE_ADOPT", "PYTEST", "COV"))
        }
        environ |= {
            "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])),
            "TRITILE_CACHE_DIR": str(tmp_path / "store"),
        }
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path, env=environ | variables, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return done.stdout.split("\n")[:-1], done.stderr

    return started


def test_a_command_and_what_it_starts(started):
    printed, errors = started("-m", "tritile", "run", sys.executable, "children.py")
    assert (
        printed == ["adopted "] * 2 + ["adopted early"] + ["adopted "] * 2
    )  # a fork has what its parent has
    assert errors == ""


@pytest.mark.parametrize(
    "how", [["library.py"], ["-c", "import library; library.main()"]], ids=["script", "import"]
)
def test_without_it_nothing_changes(started, how):
    assert started(*how) == (["Triton's "], "")


def test_variable_with_imported_tritile(started):
    for order in ("tritile, library", "library, tritile"):
        printed, errors = started("-c", f"import {order}; library.main()", TRITILE_ADOPT="1")
        assert (printed, errors) == (["adopted "], "")


def test_plugin_adopts_on_request(started):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["tritile"].partition(":")
    code = f"import library; from {module} import {name}; {name}(); {name}(); library.main()"
    assert started("-c", code) == (["Triton's "], "")
    assert started("-c", code, TRITILE_ADOPT="1") == (["adopted "], "")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(["-I"], {}), (["-E"], {}), (["-S"], {}), ([], {"PYTHONPATH": ""})],
    ids=["-I", "-E", "-S", "without the folder"],
)
def test_unread_folder_changes_nothing(started, arguments, variables):
    code = "import sys; print(hasattr(sys, '_tritile_adopts'))"
    assert started(*arguments, "-c", code, path=[SITE], TRITILE_ADOPT="1", **variables) == (["False"], "")


def test_patterns_and_modes_reach_the_processes(started):
    run = "-m", "tritile", "run"
    printed, errors = started(*run, "--kernels", "*other*", sys.executable, "library.py")
    assert printed == ["Triton's "]
    assert errors == "tritile.adopt: no kernel that was called is named '*other*'\n"
    _, errors = started(*run, "--mode", "strict", sys.executable, "library.py")
    assert "NotTunedError: mode is strict and nothing measured is remembered for add_one n=40" in errors
    started(*run, sys.executable, "library.py")
    assert started(*run, "--mode", "strict", sys.executable, "library.py") == (["adopted "], "")


OTHERS = {
    "plain": "print('other')",
    "broken": "raise ValueError('mine')",
    # As some tracers do it: the next on the path, which is ours, runs from this one.
    "chains": """
        import importlib.machinery, importlib.util, os, sys
        print('other')
        here = os.path.dirname(os.path.abspath(__file__))
        spec = importlib.machinery.PathFinder.find_spec('sitecustomize', [p for p in sys.path if p != here])
        if spec is not None:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    """,
}


@pytest.mark.parametrize(
    ("name", "ahead"), [("plain", False), ("broken", False), ("chains", False), ("chains", True)]
)
def test_another_sitecustomize_runs_once(started, tmp_path, name, ahead):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(textwrap.dedent(OTHERS[name]))
    printed, errors = started("library.py", path=[other, SITE] if ahead else [SITE, other], TRITILE_ADOPT="1")
    assert printed == ["other"] * (name != "broken") + ["adopted "]
    assert ("ValueError: mine" in errors) == (name == "broken")


def test_python_without_triton_unaffected(started, tmp_path):
    code = (
        "import sys; print([m for m in sys.modules if m.startswith(('tritile', 'importlib.', 'dataclass'))])"
    )
    assert started("-c", code, path=[SITE], TRITILE_ADOPT="1") == (["[]"], "")
    lonely = tmp_path / "lonely" / "tuner" / "startup"
    lonely.mkdir(parents=True)
    (lonely / "sitecustomize.py").write_text((SITE / "sitecustomize.py").read_text())
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").write_text("")
    (package / "autotuner.py").write_text("class Autotuner: pass")
    code = (
        "import triton.runtime.autotuner as t; print(t.Autotuner.__name__, t.__loader__.__class__.__name__)"
    )
    printed, _ = started(
        "-c", code, TRITILE_ADOPT="1", PYTHONPATH=os.pathsep.join([str(lonely), str(tmp_path)])
    )
    assert printed == ["Autotuner SourceFileLoader"]


def test_file_for_any_python_3():
    text = (SITE / "sitecustomize.py").read_text()
    compile(text, "sitecustomize.py", "exec", dont_inherit=True)
    import ast

    ast.parse(text, feature_version=(3, 4))


@pytest.mark.parametrize("value", ["", "0", "false", "OFF"])
def test_variable_is_an_off_switch(started, value):
    assert started("library.py", path=[SITE], TRITILE_ADOPT=value) == (["Triton's "], "")
    assert started("library.py", path=[SITE], TRITILE_ADOPT="true") == (["adopted "], "")


def test_another_tritile_on_the_path_adopts_nothing(started, tmp_path):
    site = tmp_path / "apart" / "tuner" / "startup"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text((SITE / "sitecustomize.py").read_text())
    printed, said = started("library.py", path=[site], TRITILE_ADOPT="1")
    assert printed == ["Triton's "]
    assert said.startswith("tritile: no kernel is adopted: tritile run is of")
    assert said.count("\n") == 1


def test_file_alone_adopts(started, tmp_path):
    """With the folder on the path, and without where the program imports tritile; 0 turns it off."""
    (tmp_path / "adopt.toml").write_text('mode = "cached"')
    options, imports = {"TRITILE_ADOPT_FILE": "adopt.toml"}, "import tritile, library; library.main()"
    assert started("library.py", path=[SITE], **options)[0] == ["adopted "]
    assert started("-c", imports, **options)[0] == ["adopted "]
    assert started("library.py", path=[SITE], TRITILE_ADOPT="0", **options) == (["Triton's "], "")
    assert started("-c", imports, TRITILE_ADOPT="0", **options)[0] == ["Triton's "]


def test_functions_of_the_current_folder(started, tmp_path):
    """The command's script lies elsewhere, and Python has that folder on its path."""
    script = tmp_path / "bin" / "command.py"
    script.parent.mkdir()
    script.write_text("from tritile.cli import main; main()")
    (tmp_path / "own.py").write_text("def bucket(n): return 64")
    run = script, "run", "--mode", "strict", "--bucket", "*:n=own:bucket", sys.executable, "library.py"
    _, errors = started(*run)
    assert "nothing measured is remembered for add_one n=64" in errors


def test_report_of_each_process(started):
    """At its end, of what was adopted; a process without kernels has none."""
    code = "import subprocess, sys, library; library.main(); subprocess.run([sys.executable, 'library.py'])"
    _, errors = started("-m", "tritile", "run", "--report", sys.executable, "-c", code)
    head, own = r"tritile, process \d+:\n", r"  \w+\.add_one: 1 problem %s\n"
    again, first = head + own % r"remembered\S*", head + own % r"measured now, in \S+ s"
    assert re.fullmatch(again + first, errors), errors
    _, errors = started("-m", "tritile", "run", "--report", sys.executable, "children.py")
    assert len(re.findall(head, errors)) == 4  # a fork of a process with a report has none of its own
    silent = {"TRITILE_ADOPT": "1", "TRITILE_ADOPT_REPORT": "1"}
    assert started("-c", "import triton.runtime.autotuner", path=[SITE], **silent) == ([], "")
    assert started("library.py", path=[SITE], TRITILE_ADOPT="1", TRITILE_ADOPT_REPORT="0")[1] == ""


def test_file_is_found_from_another_folder(started, tmp_path):
    (tmp_path / "adopt.toml").write_text('kernels = ["*nothing*"]')
    code = "import os, library; os.chdir('/'); library.main()"
    printed, errors = started("-c", code, path=[SITE], TRITILE_ADOPT="1", TRITILE_ADOPT_FILE="adopt.toml")
    assert printed == ["Triton's "]
    assert errors == "tritile.adopt: no kernel that was called is named '*nothing*'\n"


# The variables.


def test_the_variables_of_options():
    sets = environment(
        {"TRITILE_ADOPT": "*fla*", "TRITILE_ADOPT_MODE": "cached", "TRITILE_ADOPT_FILE": ""},
        {"PYTHONPATH": f"/a{os.pathsep}{SITE}"},
    )
    assert sets == {
        "TRITILE_ADOPT": "*fla*", "TRITILE_ADOPT_MODE": "cached", "PYTHONPATH": f"{SITE}{os.pathsep}/a"
    }  # fmt: skip
    assert (
        environment({}, {"PYTHONPATH": f"{os.pathsep}/x"})["PYTHONPATH"]
        == f"{SITE}{os.pathsep}{os.pathsep}/x"
    )
    with pytest.raises(InvalidValueError, match="TRITILE_ADOPT_MODE is 'fast'"):
        environment({"TRITILE_ADOPT": "1", "TRITILE_ADOPT_MODE": "fast"}, {})


def test_print_env_and_errors(started):
    run = "-m", "tritile", "run"
    printed, _ = started(*run, "--print-env", "--bucket", "*conv*:NB=next_power_of_2")
    assert printed[:2] == [
        "export TRITILE_ADOPT=1",
        "export TRITILE_ADOPT_BUCKETS='*conv*:NB=next_power_of_2'",
    ]
    for arguments, why in (
        ([], "there is no command"), (["no-such-command"], "command 'no-such-command' is not found"),
        (["--bucket", "x", "true"], "expected PATTERN:ARGUMENT=FUNCTION"),
        (["--file", "nowhere.toml", "true"], "nowhere.toml: No such file or directory\n"),
        (["--print-env", "python", "serve.py"], "--print-env runs nothing: leave out python serve.py"),
    ):  # fmt: skip
        printed, errors = started(*run, *arguments)
        assert printed == []
        assert errors.startswith("tritile: ")
        assert why in errors
        assert errors.count("\n") == 1
