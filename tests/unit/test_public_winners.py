"""docs/other_gpus.md says what the committed winners and scores say."""

import json

import public_winners as pw
from tritile.core.device import TARGETS


def test_other_gpus_page_is_written():
    assert pw.PAGE.read_text() == pw.page()


def test_scores_of_committed_winners():
    published = pw.winners()
    scores = json.loads(pw.SCORES.read_text())
    sizes = [(line["gpu"], line["m"], line["n"], line["k"]) for line in scores]
    assert sizes == [(gpu, *at) for gpu, own in published.items() for at in own]


def test_winners_name_source_licence():
    data = json.loads(pw.WINNERS.read_text())
    assert data["licence"] == "Apache-2.0"
    assert "vllm-project/vllm" in data["source"]
    assert {table["gpu"] for table in data["tables"]} == set(pw.DEVICES)


def test_scores():
    """Of the pick itself, and of blocks that no config has, which are counted apart."""
    problem, device = pw.problem_of(2048, 4096, 512, "fp8_w8a8"), TARGETS["sm_90"]
    of_none = pw.score(problem, device, [128, 96, 128, 8, 3])
    of_pick = pw.score(problem, device, pw.score(problem, device, [128, 128, 128, 8, 3])["pick"])
    assert [(each["longer"], each["faster"]) for each in (of_none, of_pick)] == [(None, None), (1.0, 0.0)]
    assert pw.close((64, 128), (128, 64))
    assert not pw.close((16, 128), (64, 128))
