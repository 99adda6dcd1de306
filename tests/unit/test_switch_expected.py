"""Which calls are expected to be won: the record, the classes, and what follows from both."""

import json
from dataclasses import replace

import pytest

import export_peers
from tritile.core.device import TARGETS, target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError, StoreWarning
from tritile.in_torch import expected, peers
from tritile.in_torch.peers import Peer, Peers, from_text, to_text
from tritile.lab.report.results import read
from tritile.planning import plans

H200, A100 = TARGETS["nvidia-h200"], TARGETS["sm_80"]
HALF = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16")
ODD = replace(HALF, m=4095, n=4097, k=4093, a_align=2, b_align=2, out_align=2)


def judged(problem, ratio=1.0, torch_us=100.0, source="table", device=H200, near=HALF):
    """Of a problem, where one was measured, the one that is near."""
    known = Peers([Peer(near, torch_us / ratio, torch_us, "table")])
    return expected.product(problem, device, known, lambda: source)


@pytest.mark.parametrize(
    ("ratio", "torch_us", "source", "take", "captured"),
    [
        (1.10, 100, "table", True, False),
        (1.10, 100, "exact", True, False),
        (1.01, 100, "table", False, False),
        (0.90, 100, "table", False, False),
        (1.50, 5, "table", True, True),
        (1.10, 100, "model", False, False),  # of another config: judged as a neighbour's
        (1.30, 100, "near", True, False),
    ],
)
def test_what_was_measured_is_judged_by_that(ratio, torch_us, source, take, captured):
    found = judged(HALF, ratio, torch_us, source)
    assert (found.take, found.captured) == (take, captured)


def test_a_measurement_of_the_models_pick_holds_for_it():
    known = Peers([Peer(HALF, 90, 100, "model")])
    assert expected.product(HALF, H200, known, lambda: "model").take
    assert not expected.product(HALF, H200, known, lambda: "near").take


@pytest.mark.parametrize(
    ("sizes", "ratio", "source", "take"),
    [
        ({"m": 5000}, 1.3, "near", True),
        ({"m": 5000}, 1.3, "model", True),
        ({"m": 5000}, 1.1, "near", False),
        ({"m": 5000}, 1.1, "exact", True),
        ({"m": 5000}, 1.01, "exact", False),
        ({"m": 9000}, 1.3, "near", False),
        ({"b_layout": "column"}, 1.3, "near", False),
        ({"dtype": "float16", "out_dtype": "float16"}, 1.3, "near", False),
        ({"epilogue": "bias=row"}, 1.3, "near", True),
    ],
)
def test_what_is_near_is_judged_by_its_neighbour(sizes, ratio, source, take):
    assert judged(replace(HALF, **sizes), ratio, source=source).take == take


def test_a_neighbours_time_goes_by_the_work():
    assert not judged(replace(HALF, m=3000), 1.3, torch_us=expected.HOST_US * 1.5).captured
    assert judged(replace(HALF, m=2500), 1.3, torch_us=expected.HOST_US * 1.5).captured


@pytest.mark.parametrize(
    ("change", "take", "captured"),
    [
        ({}, True, False),
        ({"dtype": "float16", "out_dtype": "float16"}, True, False),
        ({"a_align": 16, "b_align": 4}, True, False),
        ({"a_align": 16, "b_align": 8, "out_align": 16}, True, False),
        ({"a_align": 16, "b_align": 16}, True, False),  # out alone
        ({"a_align": 16, "b_align": 16, "out_align": 16}, False, False),
        ({"b_layout": "column", "epilogue": "bias=row"}, True, False),
        ({"epilogue": "bias=full weighted"}, True, False),
        ({"b_layout": "strided"}, False, False),
        ({"batch": 2}, False, False),
        ({"m": 500}, True, False),
        ({"m": 499}, False, False),
        ({"k": 499}, False, False),
        ({"m": 500, "n": 500, "k": 1000}, True, True),
        ({"precision": "ieee", "dtype": "float32", "out_dtype": "float32"}, False, False),
    ],
)
def test_odd_rows_of_16_bit_elements(change, take, captured):
    found = judged(replace(ODD, **change))
    assert (found.take, found.captured) == (take, captured)


def test_the_class_of_odd_rows_is_bounded_by_its_constants(monkeypatch):
    on_8 = replace(ODD, a_align=16, b_align=8, out_align=16)
    assert judged(on_8) == (True, "16-bit rows that do not start on 16 bytes: tritile is faster", False)
    monkeypatch.setattr(expected, "_ODD_BYTES", 4)
    assert judged(ODD).why == "16-bit rows that do not start on 8 bytes: tritile is faster"
    assert not judged(on_8).take
    monkeypatch.setattr(expected, "_ODD_BYTES", 8)
    monkeypatch.setattr(expected, "_ODD_FLOPS", on_8.flops + 1)
    assert judged(on_8).captured
    monkeypatch.setattr(expected, "_ODD_LEAST", (4096, 1000))
    assert not judged(on_8).take
    assert judged(replace(on_8, m=4096)).take


MIXED = replace(
    HALF, batch=2, a_align=16, b_align=8, out_align=16
)  # batches are not of the class of odd rows


@pytest.mark.parametrize(
    ("change", "take"),
    [
        ({"a_align": 8, "b_align": 16}, True),  # b of the neighbour is as little aligned
        ({"a_align": 8, "b_align": 8, "out_align": 8}, True),
        ({"a_align": 8, "m": 5000}, True),
        ({"a_align": 8, "m": 9000}, False),
        ({"b_align": 16}, False),
        ({"b_align": 16, "out_align": 8}, False),  # which operands do not share
        ({"out_align": 4}, False),  # torch then has another kernel
        ({"a_align": 8, "b_layout": "column"}, False),
        ({"a_align": 8, "dtype": "float16", "out_dtype": "float16"}, False),
        ({"a_align": 8, "epilogue": "bias=row"}, True),
    ],
)
def test_where_none_of_its_alignments_is_near_one_as_little_aligned_is(change, take):
    found = judged(replace(MIXED, **change), 1.3, source="near", near=MIXED)
    assert found.take == take
    if not take:
        assert found.why == "nothing near was measured on this GPU"
    assert not judged(replace(MIXED, **change), 1.1, source="near", near=MIXED).take


def test_neighbours_of_its_own_alignments_come_first_then_those_best_for_torch():
    asked = replace(MIXED, a_align=8)
    own, far = Peer(replace(asked, m=5000), 80, 100, "table"), Peer(replace(asked, m=9000), 10, 100, "table")
    best, worse = Peer(MIXED, 50, 100, "table"), Peer(replace(MIXED, out_align=8), 40, 100, "table")
    assert Peers([best, worse, own]).nearest(asked, 1.0) is own
    assert Peers([worse, best, far]).nearest(asked, 1.0) is best
    assert Peers([best, worse, far]).nearest(asked, 1.0) is best
    assert Peers([far]).nearest(asked, 1.0) is None


def test_results_on_few_bytes_count_as_the_operands_where_these_are_on_fewer():
    on_2 = replace(MIXED, b_align=2)
    assert len({peers.alike(replace(on_2, out_align=out)) for out in (2, 4, 8, 16)}) == 1
    assert len({peers.alike(replace(MIXED, out_align=out)) for out in (2, 4, 8, 16)}) == 3
    assert len({peers.alike(replace(HALF, out_align=out)) for out in (2, 4, 8, 16)}) == 4


def test_a_gpu_that_was_not_measured_is_left_but_for_the_classes_of_its_kind():
    assert expected.product(ODD, TARGETS["sm_90"], Peers(), lambda: "model").take
    assert not expected.product(ODD, A100, Peers(), lambda: "model").take
    assert not expected.product(HALF, A100, Peers(), lambda: "model").take


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_full_precision_is_left_before_anything_is_planned(dtype):
    asked = []
    problem = replace(HALF, dtype=dtype, out_dtype=dtype)
    assert not expected.product(problem, H200, peers.shipped(H200), lambda: asked.append(1)).take
    assert not asked


def turned(m, n, itemsize=4):
    return PermuteProblem.turned(1, m, n, itemsize)


@pytest.mark.parametrize(
    ("problem", "take", "captured"),
    [
        (turned(4096, 4096), True, False),
        (turned(1024, 1024), True, True),
        (turned(512, 512, 1), True, True),
        (turned(511, 512, 1), False, False),
        (PermuteProblem.of((4096, 4096), (4096, 1), (4096, 1), 4), False, False),
        (PermuteProblem.of((4096, 4096), (1, 5000), (4096, 1), 4), False, False),
        (PermuteProblem.of((4096, 4096), (0, 1), (4096, 1), 4), False, False),
    ],
)
def test_copies(problem, take, captured):
    found = expected.copy(problem, H200)
    assert (found.take, found.captured) == (take, captured)
    assert not expected.copy(problem, A100).take


def test_all_that_was_measured_is_judged_as_it_was_measured():
    """What is taken of it was ahead, and what was ahead is taken."""
    folder = export_peers.ROOT / "tuning" / "results" / "nvidia-h200"
    known = peers.shipped(H200)
    for peer in known.known.values():
        found = expected.product(peer.problem, H200, known, lambda peer=peer: peer.source)
        assert found.take == (peer.ratio >= 1.02), peer
    moved = [line for name in ("permute", "transpose") for line in read(folder / f"{name}.jsonl")]
    assert len(moved) > 80
    for line in moved:
        problem = export_peers.case_of(line).problem
        assert expected.copy(problem, H200).take
        assert line["ratio_torch"] > 1


def test_the_shipped_record_is_what_the_results_say():
    found = export_peers.peers_of(export_peers.lines_of("nvidia-h200"))
    assert peers.shipped(H200).known == {peer.problem: peer for peer in found}
    assert len(found) > 250
    assert peers.shipped(A100).known == {}


def test_a_planned_problem_of_the_record_is_found(monkeypatch):
    device = target_device("nvidia-h200")
    problem = max(peers.shipped(H200).known, key=lambda p: peers.shipped(H200).known[p].ratio)
    found = expected.product(
        problem, device, peers.shipped(device), lambda: plans.plan_for(problem, device).source
    )
    assert (found.take, found.why) == (True, "measured: tritile is faster")


def test_records_are_read_as_they_were_written():
    written = [Peer(HALF, 1.5, 2.5, "table"), Peer(ODD, 3.0, 9.0, "model")]
    assert list(from_text(to_text("GPU", written), "GPU").known.values()) == sorted(
        written, key=lambda peer: peer.problem.sizes
    )


GOOD = json.loads(to_text("GPU", [Peer(HALF, 1.5, 2.5, "table")]))
ENTRY = GOOD["entries"][0]


@pytest.mark.parametrize(
    "bad",
    [
        [],
        GOOD | {"format": 2},
        GOOD | {"device": "another"},
        GOOD | {"entries": None},
        GOOD | {"entries": [1]},
        GOOD | {"entries": [ENTRY | {"torch_us": 0}]},
        GOOD | {"entries": [ENTRY | {"torch_us": True}]},
        GOOD | {"entries": [ENTRY | {"source": None}]},
        GOOD | {"entries": [ENTRY | {"problem": {}}]},
        GOOD | {"entries": [{k: v for k, v in ENTRY.items() if k != "source"}]},
    ],
)
def test_what_is_no_record_is_told(bad):
    with pytest.raises(InvalidValueError):
        from_text(json.dumps(bad), "GPU")


def test_a_broken_record_warns_once_and_counts_as_none(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / f"{H200.slug}.peers.json").write_text("{")
    monkeypatch.setattr(peers.resources, "files", lambda package: tmp_path)
    peers._shipped.cache_clear()
    try:
        with pytest.warns(StoreWarning, match="no JSON"):
            assert peers.shipped(H200).known == {}
        assert peers.shipped(H200).known == {}
    finally:
        peers._shipped.cache_clear()
