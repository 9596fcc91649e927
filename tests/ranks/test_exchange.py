"""Two processes that decide together: means, agreement, and a rank that fails in the middle of a lesson."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kvcmas_sgl.radix_ext.ranks import ONE_RANK, OutOfStepError

from kvcmas_sgl.seams.ranks import TensorParallelRanks, ranks_of


def _exchange(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks = ranks_of(dist.group.WORLD, 2)
    assert isinstance(ranks, TensorParallelRanks)
    found = [ranks.mean([1.0 + rank, 10.0 - 4 * rank]).tolist(), ranks.agreed([])]
    found.append(ranks.agreed([7, 5 + rank, None, 3 if rank else None]))
    found += [ranks.step_done(False), ranks.step_done(rank == 1)]
    # Rank 1 fails where rank 0 wants a mean: both know, and both are where they were afterwards.
    if rank == 1:
        found.append(ranks.step_done(True))
    else:
        try:
            ranks.mean([1.0])
        except OutOfStepError:
            found.append(True)
    found.append(ranks.mean([float(rank)]).tolist())
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_come_to_the_same_result(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_exchange, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first == second
    assert first == [[1.5, 8.0], [], [True, False, False, False], False, True, True, [0.5]]


def test_one_rank_decides_alone() -> None:
    assert ranks_of(None, 1) is ONE_RANK
    assert ONE_RANK.mean([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert ONE_RANK.agreed([0, None]) == [True, False]
    assert (ONE_RANK.step_done(True), ONE_RANK.step_done(False)) == (True, False)
