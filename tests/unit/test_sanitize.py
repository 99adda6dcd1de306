"""What is run under compute-sanitizer: every case is a call with a config of its family."""

import subprocess

import pytest

from tests.gpu import sanitize
from tritile.core.device import target_device
from tritile.families.registry import FAMILIES
from tritile.families.work import work_of

HOPPER = target_device("nvidia-h200")


@pytest.mark.parametrize("name", sanitize.CASES)
def test_every_case_has_a_config(name):
    case = sanitize.CASES[name]
    call = case.call("cpu")
    config = sanitize.config_of(case, call, HOPPER)
    steps = [step.kernel.__name__ for step in work_of(call, config, HOPPER.processors, True).steps]
    assert config.family == case.family
    assert ("repack" in steps) == (name == "repack")


def test_every_family_has_a_case():
    ran = {(case.call("cpu").op, case.family) for case in sanitize.CASES.values()}
    assert ran == {(op, family) for op, families in FAMILIES.items() for family in families}


REPORT = """\
========= Error: Race reported between Read access at matmul_warpgroups+0x120 in kernel.py:{read}
=========     and Write access at matmul_warpgroups+0xe00 in kernel.py:{first} [6 hazards]
=========     and Write access at matmul_warpgroups+0x28e0 in kernel.py:{second} [2 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def said(monkeypatch, code, report):
    """Have the tool say so."""
    done = subprocess.CompletedProcess("compute-sanitizer", code, report, "")
    monkeypatch.setattr(sanitize.subprocess, "run", lambda command, **_: done)


@pytest.mark.parametrize("moved", ["read", "first", "second", None])
def test_only_dispatch_races_left_out(moved, tmp_path, monkeypatch, capsys):
    *_, first, last = sorted(line for *_, line in sanitize.dispatch())
    at = {"read": first, "first": first, "second": last}
    if moved:
        at[moved] = 1  # a line of something else
    said(monkeypatch, sanitize.FOUND, REPORT.format(**at))
    assert sanitize.checked("warpgroups", "racecheck", tmp_path) == (moved is None)
    assert ("FOUND" in capsys.readouterr().out) == (moved is not None)


def test_dispatch_is_kernel_head():
    source = sanitize.KERNEL.read_text().splitlines()
    lines = [source[line - 1] for _, _, line in sorted(sanitize.dispatch())]
    assert FAMILIES["matmul"]["warpgroups"].kernel.jitted.__name__ == sanitize.NAME
    assert sum("gl.warp_specialize(" in line for line in lines) == 1
    assert [line for line in lines if "def " in line] == ["def matmul_warpgroups("]
    assert not any("tma" in line for line in lines)


@pytest.mark.parametrize(
    ("code", "report"), [(0, ""), (sanitize.FOUND, "RACECHECK SUMMARY: 1 hazard displayed")]
)
def test_unreadable_report_counts(code, report, tmp_path, monkeypatch):
    said(monkeypatch, code, report)
    assert not sanitize.checked("warpgroups", "racecheck", tmp_path)
