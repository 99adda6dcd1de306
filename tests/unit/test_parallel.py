"""Layers and operators spread over two ranks give one device's answers, bit for bit, forward and backward."""

from tests.unit import helpers_for_parallel as helpers


def run_ranks(server, folder, device, works):
    """Do works as two ranks, each a process of its own; it tells where it failed."""
    ranks = [
        server.Process(target=helpers.enter_rank, args=(works, rank, device, folder))
        for rank in range(helpers.RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * helpers.RANKS


def test_two_ranks_do_as_one_device(server, tmp_path):
    run_ranks(server, tmp_path, "cpu", helpers.WORKS)
