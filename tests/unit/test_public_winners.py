"""docs/other_gpus.md says what the committed winners and scores say."""

import json

import public_winners as pw
from tritile.core.device import TARGETS


def test_the_page_is_what_the_command_writes():
    assert pw.PAGE.read_text() == pw.page()


def test_the_scores_are_of_the_committed_winners():
    published = pw.winners()
    scores = json.loads(pw.SCORES.read_text())
    sizes = [(line["gpu"], line["m"], line["n"], line["k"]) for line in scores]
    assert sizes == [(gpu, *at) for gpu, own in published.items() for at in own]


def test_the_winners_name_their_source_and_licence():
    data = json.loads(pw.WINNERS.read_text())
    assert data["licence"] == "Apache-2.0"
    assert "vllm-project/vllm" in data["source"]
    assert {table["gpu"] for table in data["tables"]} == set(pw.DEVICES)


def test_a_pick_that_is_the_winner_takes_as_long_as_the_pick():
    problem = pw.problem_of(2048, 4096, 512, "fp8_w8a8")
    pick = pw.score(problem, TARGETS["sm_90"], [128, 128, 128, 8, 3])["pick"]
    again = pw.score(problem, TARGETS["sm_90"], pick)
    assert again["longer"] == 1.0
    assert again["faster"] == 0.0


def test_blocks_that_no_config_has_are_counted_apart():
    problem = pw.problem_of(2048, 4096, 512, "fp8_w8a8")
    score = pw.score(problem, TARGETS["sm_90"], [128, 96, 128, 8, 3])
    assert score["faster"] is None
    assert score["longer"] is None


def test_blocks_are_close_where_neither_is_more_than_twice_the_other():
    assert pw.close((64, 128), (128, 64))
    assert not pw.close((16, 128), (64, 128))
