"""README.md and the pages of benchmarks and other GPUs say what committed lines say; how scripts score."""

import benchmark_kinds as kinds
import figures
import models
import plots
import public_winners as pw
import report
from benchmark_results import of_cases, stored
from tritile.core.device import TARGETS


def test_every_committed_line_is_a_result():
    wrong = []
    assert stored([kinds.RESULTS], wrong.append)
    assert not wrong


def test_readme_and_benchmarks_are_written():
    """Of the stores of trials take the smallest: predictions of the others take as long as all else."""
    assert figures.README.read_text() == figures.readme()
    small, *others = sorted(figures.STORES, key=lambda path: path.stat().st_size)
    left_out = tuple(f"| {path.name} |" for path in others)
    for name in figures.PAGES:
        lines = (figures.DOCS / name).read_text().splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith(left_out))
        assert kept == figures.page(name, stores=[small]), name


def test_first_page_is_written():
    assert figures.INDEX.read_text() == figures.index()


def test_other_gpus_page_is_written():
    assert pw.PAGE.read_text() == pw.page()


def test_scores():
    """Of the pick itself, and of blocks that no config has, which are counted apart."""
    problem, device = pw.problem_of(2048, 4096, 512, "fp8_w8a8"), TARGETS["sm_90"]
    of_none = pw.score(problem, device, [128, 96, 128, 8, 3])
    of_pick = pw.score(problem, device, pw.score(problem, device, [128, 128, 128, 8, 3])["pick"])
    assert [(each["longer"], each["faster"]) for each in (of_none, of_pick)] == [(None, None), (1.0, 0.0)]
    assert pw.close((64, 128), (128, 64))
    assert not pw.close((16, 128), (64, 128))


def test_pictures_of_rates_are_drawn():
    assert plots.PICTURE.read_text() == plots.picture()
    assert plots.ODD.read_text() == plots.odd_sizes()


def test_picture_of_ratios_is_drawn():
    assert report.PICTURE.read_text() == figures.ratios()


def test_losing_kinds_are_listed():
    """Gather the kinds from the other tables of the page, and look for each in this one."""
    shown = kinds.rows(of_cases(stored([kinds.RESULTS], print)))
    here = [(*row[2:], row[1]) for row in kinds.losses(kinds.HERE / "results") if row[0] == "H200"]
    losing = {row[:3]: row for row in here if not row[0].startswith(("one weight", "models"))}
    assert losing.keys() >= {row[:3] for row in shown if min(map(float, row[4:6])) < 0.995}
    assert all(min(map(float, row[4:6])) < 1 for row in here)
    others = {row[:3]: row for row in shown}
    for kind, row in losing.items():
        assert (row[3], *row[6:9]) == (others[kind][3], *others[kind][6:])
    assert kinds.OTHERWISE not in {row[-1] for row in here}  # kinds that lose have advice of their own
    assert kinds.advice(("new", "float16", "NN")) == kinds.OTHERWISE


def test_interval_of_models():
    """It holds the ratio, is repeatable, and forgives a pair that was disturbed."""
    off = [1.00, 1.01, 0.99, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00]
    found = models.compared(off, [1.0] * 9)
    assert 0.98 <= found["low"] < found["ratio"] == 1.0 < found["high"] <= 1.02
    assert models.compared(off, [1.0] * 9) == found
    assert models.compared([*off[:-1], 5.0], [1.0] * 9)["high"] < 1.03
    found = models.compared([3.0] * 9, [2.0] * 9)
    assert found == {"torch_ms": 3.0, "tritile_ms": 2.0, "ratio": 1.5, "low": 1.5, "high": 1.5}


def test_sides_take_turns(monkeypatch):
    monkeypatch.setattr(models, "SECONDS", 0.0)  # an iteration a time
    order = []
    found = models.measured({side: lambda side=side: order.append(side) for side in models.SIDES}, 3)
    first, second = models.SIDES
    turn, other = [first, first, second, second], [second, second, first, first]
    assert order == ["torch"] * 3 + turn + other + turn  # first: how long an iteration takes
    assert (found["turns"], found["iterations"]) == (3, 1)
