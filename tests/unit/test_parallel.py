"""Layers and operators spread over two ranks give one device's answers, bit for bit, forward and backward."""

from tests.unit import helpers_for_parallel as helpers

WORKS = ["mlp", "attention", "operators", "two_dimensions", "fully_sharded", "synced"]


def test_two_ranks_do_as_one_device(server, tmp_path):
    ranks = [
        server.Process(target=helpers.enter_rank, args=(WORKS, rank, "cpu", tmp_path))
        for rank in range(helpers.RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * helpers.RANKS  # each tells where it failed
