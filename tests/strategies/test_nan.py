"""Workers with non-finite parameters are excluded from the round, with every algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import StragglerSimulator
from lightning_loco.algorithms import Algorithm, KeepProgress, RoundInfo, State
from tests.cases import KINDS, Case, rows, without_variants
from tests.harness.cover import cover
from tests.harness.messages import messages_of
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import (
    TinyModule,
    flat,
    make_loader,
    make_model,
    norm_model,
    train_step,
    worker_batch,
)
from tests.harness.toys import updated
from tests.strategies.families import fit_with, remote_or_ddp
from tests.strategies.test_remote import ReadInHooks

pytestmark = pytest.mark.recovery

LR = 0.05


class NaNModule(TinyModule):
    """Gives chosen workers a batch with NaN."""

    def __init__(self, broken: tuple[int, ...], model: nn.Module, optimizer: str) -> None:
        super().__init__(lr=LR, optimizer=optimizer)
        self.model = model
        self.broken = broken
        self.buffers_validated: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank in self.broken:
            batch = batch[0] * torch.nan, batch[1]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.buffers_validated.append(
            torch.cat([b.reshape(-1) for b in [*self.buffers(), torch.zeros(1)]])
        )


def fit_with_nan(
    rank: int,
    world: int,
    case: Case,
    broken: tuple[int, ...],
    optimizer: str = "SGD",
    with_norm: bool = False,
) -> dict[str, Any]:
    module = NaNModule(broken, norm_model() if with_norm else make_model(), optimizer)
    num_batches = 30 if case.by_clock else 9
    trainer = make_trainer(
        case.strategy(sync_every=3),
        callbacks=[StragglerSimulator({rank: 0.01})] if case.by_clock else [],
        max_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    error = ""
    with messages_of("lightning_loco") as texts:
        try:
            trainer.fit(module, make_loader(rank, num_batches), make_loader(rank, 1))
        except RuntimeError as raised:
            error = str(raised)
    return {
        "weights": flat(module),
        "losses": module.losses,
        "warnings": [text for text in texts if "NaN" in text],
        "error": error,
        "validated": module.buffers_validated,
    }


def restarted(algorithm: Algorithm, start: Tensor, state: State) -> Tensor:
    """Return the start of the round from the state, or zeros if the state does not have it."""
    remembered = algorithm.round_start(state)
    return torch.zeros_like(start) if remembered is None else remembered.clone()


def leave_out(case: Case, broken: int, world: int) -> Tensor:
    """Compute the mean after three phases if a worker is excluded from the first of two rounds."""
    model = make_model()
    start = flat(model)
    algorithm = case.prepared(world)
    states = [algorithm.init(start.clone()) for _ in range(world)]
    params = [start.clone() for _ in range(world)]
    keeps = case.overlap and algorithm.merge_policy == KeepProgress()
    pending: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def apply() -> None:
        """Apply the results, and add the progress made since the messages were sent."""
        for worker, (message, received, sent_params) in enumerate(pending):
            own = params[worker].clone(), message.clone()
            result = updated(algorithm, *own, received.clone(), states[worker]).clone()
            progress = 0.0 if sent_params is None else params[worker] - sent_params
            params[worker] = result + progress
        pending.clear()

    for round_index in range(3):
        for worker in range(world):
            nn.utils.vector_to_parameters(params[worker].clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for step in range(3 * round_index, 3 * round_index + 3):
                train_step(model, optimizer, worker_batch(worker, step))
            if round_index > 0 or worker != broken:
                params[worker] = flat(model)
            else:
                params[worker] = restarted(algorithm, start, states[worker])
        if round_index == 2:
            break
        if keeps:
            apply()
        pairs = zip(params, states, strict=True)
        messages = [algorithm.propose(p.clone(), state, RoundInfo()).clone() for p, state in pairs]
        if case.graph is not None:
            matrix = case.graph.mixing_matrix(world, round_index)
            received = list(matrix @ torch.stack(messages))
        else:
            valid = [m for i, m in enumerate(messages) if round_index > 0 or i != broken]
            received = [sum(valid) / len(valid)] * world
        late = case.overlap and not (case.warm_start and round_index == 0)
        if late and not keeps:
            ended = [(None, None, r.clone()) for _, r, _ in pending] or [None] * world
            pending.clear()
            three = zip(messages, ended, states, strict=True)
            again = [
                algorithm.on_send(message, one, state, RoundInfo()) for message, one, state in three
            ]
            params = [
                p if new is None else new.clone() for p, new in zip(params, again, strict=True)
            ]
        sent: list[Tensor | None] = [p.clone() if late and keeps else None for p in params]
        if round_index == 0:
            sent[broken] = None
        pending.extend(zip(messages, received, sent, strict=True))
        if not late:
            apply()
    return torch.stack(params).mean(0)


@rows("nan by hand")
def test_a_worker_with_nan_is_left_out_of_one_round(pool: Pool, case: Case) -> None:
    results = pool.run(fit_with_nan, case, (1,), world=3)
    expected = leave_out(case, broken=1, world=3)
    for result in results:
        assert result["error"] == ""
        torch.testing.assert_close(result["weights"], expected, rtol=0, atol=1e-12)
    assert [len(result["warnings"]) for result in results] == [1, 0, 0]
    assert "worker 1 at round 0: left out" in results[0]["warnings"][0]
    is_nan = [torch.tensor(result["losses"]).isnan().tolist() for result in results]
    assert is_nan[1] == [False, True, True] + [False] * 6
    assert not any(is_nan[0] + is_nan[2])


@rows("nan ends", without_variants(), KINDS)
def test_nan_does_not_stay_in_the_inner_optimizer(pool: Pool, case: Case) -> None:
    results = pool.run(fit_with_nan, case, (1,), "Adam", world=2)
    ended = 10 if case.by_clock else 3
    for result in results:
        assert result["error"] == ""
        assert torch.isfinite(result["weights"]).all()
        assert torch.equal(result["weights"], results[0]["weights"])
        assert torch.isfinite(torch.tensor(result["losses"][ended:])).all()


@rows("nan ends", without_variants(), KINDS)
def test_nan_does_not_stay_in_statistics_of_batch_norm(pool: Pool, case: Case) -> None:
    for result in pool.run(fit_with_nan, case, (1,), "SGD", True, world=2):
        assert result["error"] == ""
        assert torch.isfinite(result["weights"]).all()
        assert torch.isfinite(result["validated"][-1]).all()


@rows("nan")
def test_nan_everywhere_is_an_error_on_every_rank(pool: Pool, case: Case) -> None:
    for result in pool.run(fit_with_nan, case, (0, 1), world=2):
        assert "NaN or infinity" in result["error"]
        assert "Lower the learning rate" in result["error"]


class NaNOnce(TinyModule):
    """Has a NaN loss on one worker in one step."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.broken = broken

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_rank == self.broken and batch_idx == 2 else loss


class NaNInHooks(ReadInHooks, NaNOnce):
    """Its hooks read the mean gradient as well."""


def fit_remotely(rank: int, world: int, module: TinyModule, options: dict[str, Any]) -> None:
    fit_with(remote_or_ddp(2, **options), module, make_loader(rank, 6))


@pytest.mark.parametrize(
    ("kind", "options", "broken"),
    [
        *cover([NaNOnce], [{}, {"overlap": False}, {"num_servers": 2}], [1, 0], strength=1),
        (NaNInHooks, {}, 1),
    ],
    ids=str,
)
def test_with_a_remote_optimizer_nan_ends_the_run_with_the_name_of_the_worker(
    pool: Pool, kind: type[NaNOnce], options: dict[str, Any], broken: int
) -> None:
    world = 2 + options.get("num_servers", 1)
    with pytest.raises(PoolError) as caught:
        pool.run(fit_remotely, kind(broken), options, world=world)
    assert set(caught.value.failures) == set(range(world))
    for failure in caught.value.failures.values():
        assert f"Worker {broken}: a gradient is not finite" in failure.message
