"""The report: rows from files, figures and tables from rows, and pages that no data can break."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import commands
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MATMUL_DTYPES, PRECISIONS, KernelProblem, MatmulProblem
from tritile.errors import InvalidValueError
from tritile.families import registry as families
from tritile.lab.report.page import charts, document, figures, rows, searches
from tritile.lab.report.results import Measurement, Result, append, host_result, result, stored
from tritile.planning.store import Store, store_of
from tritile.planning.trial import Trial
from tritile.tune.suites import parse_shape

H200 = target_device("nvidia-h200")
ENV = {
    "gpu": H200.name, "torch": "2.11.0", "triton": "3.6.0", "driver": "1.2", "tritile": "abc",
    "time": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
CONFIG = Config.of(family="tile", BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8)
PROBLEM = MatmulProblem(1, 256, 256, 256, "bfloat16", "bfloat16")
HOSTILE = "<script>alert('x')</script><!--"


def line(text="256x256x256", ratio=2.0, suite="square", gpu=H200.name, inductor=None, op="matmul") -> Result:
    case = parse_shape(text, op=op, suite=suite)
    exact = 0.0 if op == "permute" else 1e-3
    copy = 2000.0 if op == "permute" else None
    measured = Measurement(10.0, 10.0 * ratio, inductor, 0.01, exact, 2 * exact, copy, CONFIG, "table")
    return result(case, measured, ENV | {"gpu": gpu})


def tile(m: int, n: int, **rest: int) -> Config:
    return Config.of(family="tile", **({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 32, "GROUP_M": 8} | rest))


TRIALS = [
    Trial(PROBLEM, tile(64, 64), 20.0),
    Trial(PROBLEM, tile(64, 64, GROUP_M=1), 10.0),
    Trial(PROBLEM, tile(64, 128), None, failure="spills"),
    Trial(PROBLEM, tile(128, 64), 40.0),
    Trial(PROBLEM, tile(128, 128), 8.0),
]


def made(lines: list[Result], trials: list[Trial] = ()) -> rows.Rows:
    stores = [("a store", list(trials))] * bool(trials)
    return searches.gathered(lines, stores, H200.name, H200)


def run(*arguments: object):
    return commands.run("report", *arguments)


def embedded(html: str) -> dict:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1)

    def never(name: str) -> None:
        raise AssertionError(f"{name} in the page's JSON")

    return json.loads(text, parse_constant=never)


def test_results_as_rows_are_of_one_gpu_each_case_by_its_last() -> None:
    lines = [line(ratio=1.0), line(ratio=3.0), line("8x8x8", gpu="other"), line("64x32", op="permute")]
    found = made([*lines, host_result("matmul(a, b)", 5.0, 6.0, ENV)])
    assert [(row["problem"], row["torch"]) for row in found.results] == [("256x256x256", 3.0), ("64x32", 2.0)]
    assert [row["r"] for row in found.results] == [0, 1]
    assert found.results[0]["intensity"] == pytest.approx(2 * 256**3 / (3 * 256 * 256 * 2))
    assert found.results[1]["layout"] == ""
    assert [row["call"] for row in found.hosts] == ["matmul(a, b)"]
    assert found.left_out == {"other": 1}
    assert found.env["tritile"] == ["abc"]


def test_the_gpu_with_the_most_results_is_reported() -> None:
    lines = [line("8x8x8", gpu="one"), line("8x8x8", gpu="two"), line("16x8x8", gpu="two")]
    assert rows.gpu_of(lines) == "two"
    assert rows.gpu_of([]) is None
    assert rows.named(H200.name).memory_gbps == H200.memory_gbps
    assert rows.named("two") is None


def test_dtypes_of_one_rate_share_a_roof() -> None:
    lines = [line(), line() | {"dtype": "float16"}, line() | {"dtype": "float32"}]
    assert [roof["dtypes"] for roof in made(lines).roofs] == [["float32"], ["bfloat16", "float16"]]
    assert searches.gathered(lines, [], H200.name, None).roofs == []


def test_cells_are_the_best_of_each_tile() -> None:
    found = made([line()], TRIALS)
    cells = {(row["y"], row["x"]): (row["us"], row["ratio"], row["configs"]) for row in found.cells}
    assert cells == {
        (64, 64): (10.0, 1.25, 2), (64, 128): (None, None, 1),
        (128, 64): (40.0, 5.0, 1), (128, 128): (8.0, 1.0, 1),
    }  # fmt: skip
    (search,) = found.searches
    assert (search["configs"], search["failed"], search["best_us"], search["within"]) == (5, 1, 8.0, 5)
    assert search["suite"] == ["square"]  # of the result that posed the same problem
    assert found.trials == 5


def test_progress_is_the_best_so_far_and_waits_for_what_works() -> None:
    found = made([], TRIALS)
    assert [(row["tried"], row["ratio"]) for row in found.progress] == [
        (1, 2.5), (2, 1.25), (3, 1.25), (4, 1.25), (5, 1.0),
    ]  # fmt: skip
    late = made([], [TRIALS[2], TRIALS[0]])
    assert [(row["tried"], row["ratio"]) for row in late.progress] == [(2, 1.0)]
    assert made([], TRIALS[2:3]).searches == []  # nothing worked


def test_a_problem_is_mapped_by_the_store_that_tried_most_of_it() -> None:
    stores = [("few", TRIALS[:2]), ("many", TRIALS)]
    found, cells, _ = searches.searched(stores, {})
    assert [(row["store"], row["mapped"]) for row in found] == [("many", True), ("few", False)]
    assert {row["s"] for row in cells} == {0}
    assert found[0]["dtype"] == ["bfloat16"]  # what the problem tells of itself
    assert found[0]["layout"] == ["NN"]


def test_kernels_of_others_are_mapped_by_the_parameters_they_have() -> None:
    problem = KernelProblem("softmax", (("n", 1000),), (("x", "float32"),))
    configs = [Config.of(ROWS=r, BLOCK=b, num_warps=4) for r in (1, 2, 4) for b in (256, 512)]
    trials = [Trial(problem, config, 5.0 + i) for i, config in enumerate(configs)]
    found, cells, _ = searches.searched([("own", trials)], {})
    assert (found[0]["down"], found[0]["across"]) == ("ROWS", "BLOCK")
    assert {(row["y"], row["x"]) for row in cells} == {(r, b) for r in (1, 2, 4) for b in (256, 512)}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_specified_with_their_data_left_out(name) -> None:
    found = made([line(), line("64x32", op="permute")], TRIALS)
    spec = figures.FIGURES[name].spec(found)
    text = json.dumps(spec, allow_nan=False)
    assert f'"name": "{figures.FIGURES[name].data}"' in text
    assert "256x256x256" not in text
    assert spec["width"] == "container"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_drawn_as_pictures(name) -> None:
    found = made([line(), line("64x32", op="permute")], TRIALS)
    svg = document.picture(name, found, "svg").decode()
    assert svg.startswith("<svg")
    assert "NaN" not in svg
    assert document.picture(name, found, "png").startswith(b"\x89PNG")


def test_errors_are_compared_where_the_reference_is_not_torchs_own() -> None:
    lines = [line(), line("8x8x8") | {"dtype": "float64", "error": 5e-15, "torch_error": 2e-15}]
    found = made(lines)
    assert [row["over"] for row in found.results] == [0.5, None]
    assert [row["problem"] for row in charts.erring(found)] == ["256x256x256"]


def test_the_headline_tells_gains_and_losses() -> None:
    lines = [line(ratio=4.0), line("8x8x8", ratio=1.0), line("9x9x9", ratio=0.5, suite="odd")]
    assert figures.headline(made(lines)) == [
        "tritile is 1.26x as fast as torch, by the geometric mean of what was measured: as fast or faster on "
        "2 of 3 problems.",
        "By type and suite, it gains most on bfloat16 in square (2.00x).",
        "It loses on 1 of 2 pairs of type and suite, most on bfloat16 in odd (0.50x).",
        "Slowest beside torch is 9x9x9 NN bfloat16, at 0.50x.",
    ]
    assert figures.headline(made(lines[1:2]))[1:3] == [
        "It gains on no pair of type and suite.",
        "It loses on no pair of type and suite.",
    ]
    (told,) = figures.headline(made([], TRIALS))
    assert told.startswith("Searches: 1. Configs tried: 5.")


def test_every_series_has_a_mark_of_its_own() -> None:
    lines = [line(f"{8 + i}x8x8") | {"dtype": dtype} for i, dtype in enumerate(MATMUL_DTYPES)]
    found = made(lines)
    assert {row["type"] for row in found.results} <= set(rows.TYPES)
    assert len(set(rows.TYPES)) == len(rows.TYPES) <= len(charts.LIGHT["range"]["category"])
    for theme in (charts.LIGHT, charts.DARK):
        colours = [tuple(bytes.fromhex(each[1:])) for each in theme["range"]["category"]]
        assert min(math.dist(*pair) for pair in itertools.combinations(colours, 2)) > 50
    assert all(len(values) <= len(set(charts._SHAPES)) for values in (rows.TYPES, PRECISIONS))
    ops = [{"s": i, "op": f"op{i}", "tried": 1, "ratio": 1.0} for i in range(9)]
    found.progress = ops
    domain = figures.FIGURES["progress"].spec(found)["layer"][0]["encoding"]["color"]["scale"]["domain"]
    assert domain == [*(f"op{i}" for i in range(6)), "others"]


def test_pictures_have_the_colours_of_each_scheme() -> None:
    svg = document.picture("speedups", made([line()]), "svg").decode()
    style = re.search(r"<style>@media \(prefers-color-scheme: dark\)\{(.*?)</style>", svg).group(1)
    body = svg.replace(style, "")
    used = set(re.findall(r'(?:fill|stroke)="(#\w+|white)"', body)) - {"#000"}
    assert used
    assert used <= set(charts.IN_THE_DARK)
    assert all(f'[fill="{colour}"]{{fill:{charts.IN_THE_DARK[colour]}}}' in style for colour in used)


def test_slower_and_faster_differ_by_shape() -> None:
    svg = document.picture("speedups", made([line(ratio=0.5), line("8x8x8", ratio=2.0)]), "svg").decode()
    assert "slower" in svg
    (points,) = re.findall(r'<g class="mark-symbol role-mark[^>]*>(.*?)</g>', svg, re.S)
    arcs = ["A" in path for path in re.findall(r' d="([^"]+)"', points)]
    assert sorted(arcs) == [False, True]  # a triangle, and a circle


@pytest.mark.parametrize(
    ("name", "kind", "problem", "wanted"),
    [
        ("pie", "svg", "", "speedups, roofline"),
        ("roofline", "jpg", "", ".svg or .png"),
        ("bandwidth", "svg", "", "tritile bench --output"),
        ("heatmap", "svg", "9x9x9", "9x9x9"),
    ],
)
def test_pictures_that_cannot_be(name, kind, problem, wanted) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(wanted)):
        document.picture(name, made([line()], TRIALS), kind, problem)


def test_tables_have_every_result_and_share_of_its_roof() -> None:
    found = made([line(ratio=0.5), line("512x512x512"), line("64x32", op="permute")])
    assert [key for key, _ in figures.FIGURES["speedups"].table(found).lines] == ["r0", "r1", "r2"]
    roof = figures.FIGURES["roofline"].table(found)
    heads = [title for title, _ in roof.heads]
    cells = dict(zip(heads, roof.lines[0][1], strict=True))
    rate, bound = found.results[0]["tflops"], 4.8 * found.results[0]["intensity"]
    assert cells["of its roof"] == f"{100 * rate / bound:.2f}%"
    assert "inductor us" not in [title for title, _ in figures.FIGURES["speedups"].table(found).heads]


@pytest.fixture(scope="module")
def hostile() -> str:
    """Make a page of results and trials whose texts would be markup."""
    lines = [line(suite=HOSTILE), line("64x32", op="permute", suite=HOSTILE)]
    lines[0]["plan_source"] = HOSTILE
    return document.html(made([item | {"env": ENV | {"torch": HOSTILE}} for item in lines], TRIALS))


@pytest.fixture(scope="module")
def results_only() -> str:
    return document.html(made([line(suite=""), line("8x8x8")]))


def test_data_cannot_be_markup(hostile) -> None:
    html = hostile
    assert "alert('x')" not in html
    assert html.count("&lt;script&gt;") > 3
    data = embedded(html)
    assert HOSTILE in data["rows"]["results"]["columns"]["suite"]["words"]
    # Each script ends where we end it: nothing within begins or ends another.
    for body in re.findall(r"<script[^>]*>(.*?)</script>", html, re.S):
        assert "<!--" not in body
    assert html.count("</script>") == 3


def test_the_page_asks_for_nothing(hostile) -> None:
    html = hostile
    head = html[: html.index("<script")]
    assert "default-src 'none'" in head
    assert not re.search(r"""(src|href)=["'](?!#)""", re.sub(r"<script.*?</script>", "", html, flags=re.S))
    assert len(html) < 3e6


def test_without_results_or_trials_it_says_what_makes_them(results_only) -> None:
    with pytest.raises(InvalidValueError, match=r"tritile bench .* tritile tune"):
        document.html(made([]))
    assert "tritile tune makes them" in results_only
    assert embedded(results_only)["rows"]["cells"]["count"] == 0


def test_the_command_names_broken_lines_and_says_what_it_wrote(tmp_path) -> None:
    path, output = tmp_path / "a.jsonl", tmp_path / "deep" / "page.html"
    append(path, [line(), line("8x8x8", gpu="other")])
    with path.open("a") as file:
        file.write('{"op": "matmul"}\n')
    done = run(path, "--target", "nvidia-h200", "--output", output)
    said = "".join(done.output.split())  # lines break wherever the path is long
    assert done.exit_code == 0, done.output
    for words in ("a.jsonl: 1 of", "line 3", "1 results of other are left out", "1 results, 0 trials"):
        assert words.replace(" ", "") in said
    assert "256x256x256" in output.read_text()


def test_the_command_reads_stores_the_users_own_too(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    store = Store(H200, folder)
    digest = families.FAMILIES["matmul"]["tile"].digest
    store.add(digest, replace(TRIALS[0], measured_utc="2026-01-01T00:00:00+00:00"))
    done = run(folder / "nvidia-h200.sqlite3", "--output", tmp_path / "a.html")
    assert done.exit_code == 0, done.output
    assert "0 results, 1 trials" in " ".join(done.output.split())
    assert "tritile bench --output DIR" in (tmp_path / "a.html").read_text()
    own = store_of(H200)
    own.add(digest, replace(TRIALS[0], measured_utc="2026-01-01T00:00:00+00:00"))
    monkeypatch.setattr("tritile.cli.report.kept", lambda folder: None)
    done = run("--target", "nvidia-h200", "--output", tmp_path / "b.html")
    assert "0 results, 1 trials" in " ".join(done.output.split())
    assert "your store" in (tmp_path / "b.html").read_text()


def test_without_its_packages_the_command_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tritile.cli.shared.find_spec", lambda name: None if name == "altair" else name)
    append(tmp_path / "a.jsonl", [line()])
    told = commands.refused("report", tmp_path / "a.jsonl", "--output", tmp_path / "a.html", status=1)
    assert "altair: pip install 'tritile[report]'" in told


def test_a_suite_without_a_name_has_one_in_the_report(results_only) -> None:
    found = made([line(suite=""), line("8x8x8")])
    assert [row["suite"] for row in found.results] == ["(no name)", "square"]
    assert "bfloat16 in (no name)" in results_only


def test_the_command_saves_one_figure(tmp_path) -> None:
    append(tmp_path / "a.jsonl", [line()])
    done = run(tmp_path / "a.jsonl", "--figure", "speedups", "--output", tmp_path / "x.svg")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_committed_results_are_all_in_the_report() -> None:
    folder = Path(__file__).parents[2] / "tuning" / "results"
    if not folder.is_dir():
        pytest.skip("no committed results here")
    lines = stored([folder], pytest.fail)
    report = searches.gathered(lines, [], H200.name, H200)
    data = embedded(document.html(report))
    assert data["rows"]["results"]["count"] == len(report.results) > 100
