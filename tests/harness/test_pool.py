"""The pool itself: results, failures, hangs, and Lightning inside it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer


def add_up(rank: int, world: int, offset: float) -> tuple[int, torch.Tensor]:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, value


def fail_on_one(rank: int, world: int) -> None:
    dist.barrier()  # all are connected
    if rank == 1:
        raise KeyError("a word that only rank 1 says")
    dist.barrier()


def hang_on_one(rank: int, world: int) -> int:
    while rank == 1:
        time.sleep(0.1)
    return rank


def exit_on_one(rank: int, world: int) -> int:
    if rank == 1:
        os._exit(7)
    return rank


def leave_a_thread(rank: int, world: int) -> None:
    if rank == 0:
        threading.Thread(target=time.sleep, args=(600,), daemon=True, name="forgotten").start()


def fail_in_a_thread(rank: int, world: int) -> int:
    def divide() -> None:
        1 / rank

    thread = threading.Thread(target=divide)
    thread.start()
    thread.join()
    return rank


def warn(rank: int, world: int) -> None:
    warnings.warn("a new kind of trouble", UserWarning, stacklevel=1)


def return_a_function(rank: int, world: int) -> object:
    return lambda: rank


def surroundings(rank: int, world: int) -> tuple[str, str | None, float, int]:
    os.environ["LEFT_BY_A_JOB"] = "1"
    seen = os.environ.get("SEEN_BY_JOBS")
    return os.getcwd(), seen, torch.rand(1).item(), torch.get_num_threads()


def left_environment(rank: int, world: int) -> str | None:
    return os.environ.get("LEFT_BY_A_JOB")


def test_results_come_by_rank(pool: Pool) -> None:
    for world in (1, 2, 3, 4):
        results = pool.run(add_up, 0.5, world=world)
        total = torch.tensor([sum(rank + 0.5 for rank in range(world))])
        assert [rank for rank, _ in results] == list(range(world))
        assert all(torch.equal(value, total) for _, value in results)


def test_world_must_fit(pool: Pool) -> None:
    with pytest.raises(ValueError, match="between 1 and 4, got 5"):
        pool.run(add_up, 0.5, world=5)


def test_one_failing_rank_is_named_and_the_pool_goes_on(pool: Pool) -> None:
    """The other ranks learn of it at once; otherwise they would be killed and missing."""
    with pytest.raises(PoolError, match="a word that only rank 1 says") as caught:
        pool.run(fail_on_one)
    text = str(caught.value)
    assert text.startswith("rank 1 of 4 failed in tests.harness.test_pool.fail_on_one:")
    assert "line" in text
    assert "in fail_on_one" in text
    assert caught.value.failures[1].type_name == "KeyError"
    assert caught.value.missing == []
    assert pool.run(add_up, 1.0, world=2)[1][1].item() == 3.0


def test_a_rank_that_hangs_is_shown_and_replaced(pool: Pool) -> None:
    with pytest.raises(PoolError, match="rank 1 of 3 in .*hang_on_one did not") as caught:
        pool.run(hang_on_one, world=3, timeout_s=1)
    assert caught.value.missing == [1]
    assert caught.value.failures == {}
    assert "in hang_on_one" in str(caught.value)
    assert pool.run(add_up, 1.0, world=3)[1][1].item() == 6.0


def test_a_rank_that_dies_is_named_and_replaced(pool: Pool) -> None:
    with pytest.raises(PoolError, match="rank 1 of 2 .* died with exit code 7") as caught:
        pool.run(exit_on_one, world=2)
    assert caught.value.missing == [1]
    assert pool.run(add_up, 1.0, world=2)[1][1].item() == 3.0


def test_a_forgotten_thread_is_a_failure(pool: Pool) -> None:
    with pytest.raises(PoolError, match="(?s)rank 0 of 1 .*left behind: thread 'forgotten'"):
        pool.run(leave_a_thread, world=1)
    assert pool.run(add_up, 1.0, world=1)[0][1].item() == 1.0


def test_an_exception_in_a_thread_is_a_failure(pool: Pool) -> None:
    with pytest.raises(PoolError, match="(?s)rank 0 of 2 .*thread .*ZeroDivisionError") as caught:
        pool.run(fail_in_a_thread, world=2)
    assert list(caught.value.failures) == [0]


def test_warnings_are_errors_in_jobs_too(pool: Pool) -> None:
    with pytest.raises(PoolError, match="UserWarning: a new kind of trouble"):
        pool.run(warn, world=1)


def test_a_result_that_cannot_be_sent_is_a_failure(pool: Pool) -> None:
    with pytest.raises(PoolError, match="rank 0 of 1 failed in .*return_a_function"):
        pool.run(return_a_function, world=1)


def test_jobs_see_the_surroundings_of_the_test(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEEN_BY_JOBS", "yes")
    first, second = pool.run(surroundings, world=2), pool.run(surroundings, world=2)
    assert first == second, "the generators should be seeded"
    assert first[0][2] != first[1][2], "and differently on each rank"
    assert [seen[:2] for seen in first] == [(str(tmp_path), "yes")] * 2
    assert [seen[3] for seen in first] == [1, 1]
    assert pool.run(left_environment, world=2) == [None, None]


class Line(LightningModule):
    """Least squares for a straight line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        (inputs,) = batch
        self.seen += inputs.flatten().tolist()
        return torch.nn.functional.mse_loss(self.layer(inputs), 2 * inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(rank: int, world: int) -> tuple[list[torch.Tensor], list[float], int]:
    model = Line()
    data = TensorDataset(torch.arange(8.0).unsqueeze(1))
    trainer = make_trainer(DDPStrategy(), max_epochs=1)
    trainer.fit(model, DataLoader(data, batch_size=2))
    return [p.detach() for p in model.parameters()], model.seen, trainer.global_step


def ranks_of_trainer(rank: int, world: int) -> tuple[int, int, int]:
    environment = PoolEnvironment(num_nodes=2)
    return environment.global_rank(), environment.node_rank(), environment.local_rank()


def test_a_trainer_fits_inside_the_pool(pool: Pool) -> None:
    (first, first_seen, steps), (second, second_seen, _) = pool.run(fit, world=2)
    assert steps == 2
    assert sorted(first_seen + second_seen) == list(range(8)), "each sample on one rank"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Ranks have different seeds, so equal parameters come from DDP's broadcast and reduction.


def test_environment_spreads_ranks_over_nodes(pool: Pool) -> None:
    assert pool.run(ranks_of_trainer) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
