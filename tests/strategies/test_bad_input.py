"""Mistakes are refused with one clear message, on every rank, before the first training step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCo,
    DiLoCoStrategy,
    GASLoC,
    GASLoCStrategy,
    LocalSGD,
    LocalSGDStrategy,
    LocoStrategy,
    Simulation,
)
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader, make_model

NAN = math.nan

# --------------------------------------------------------------------- at construction


def test_sync_every(subtests: pytest.Subtests) -> None:
    text = "sync_every counts optimizer steps between rounds and "
    rows: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "must be at least 1, got 0. Use sync_every=1"),
        (-3, ValueError, "must be at least 1, got -3"),
        ([4, 0], ValueError, r"must be at least 1, got \[4, 0\]"),
        (1.5, TypeError, "must be an integer .*, got 1.5"),
        (True, TypeError, "must be an integer .*, got True"),
        ("10", TypeError, "must be an integer .*, got '10'"),
        (None, TypeError, "must be an integer .*, got None"),
        ([4, 2.0], TypeError, r"must be an integer .*, got \[4, 2.0\]"),
    ]
    for strategy in (LocalSGDStrategy, DiLoCoStrategy, AsyncDiLoCoStrategy):
        for sync_every, error, end in rows:
            with (
                subtests.test(strategy.__name__, sync_every=sync_every),
                pytest.raises(error, match=text + end),
            ):
                strategy(sync_every=sync_every)


def test_arguments_of_all_strategies(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"evaluate": "mean"},
            ValueError,
            "evaluate must be one of average, outer, local, got 'mean'",
        ),
        ({"evaluate": None}, ValueError, "evaluate must be one of average, outer, local, got None"),
        ({"finalize": "drop"}, ValueError, "finalize must be one of average, keep, got 'drop'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be positive and finite, got 0"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s must be positive and finite, got -1.0"),
        ({"timeout_s": NAN}, ValueError, "timeout_s must be positive and finite, got nan"),
        ({"timeout_s": math.inf}, ValueError, "timeout_s must be positive and finite, got inf"),
        ({"timeout_s": "600"}, TypeError, "timeout_s must be a number, got '600'"),
        ({"timeout_s": None}, TypeError, "timeout_s must be a number, got None"),
        ({"outer_device": "cuda"}, ValueError, "outer_device must be 'cpu' for the host's memory"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be positive and finite, got 0"),
        ({"bucket_bytes": 1e6}, TypeError, "bucket_bytes must be an integer, got 1000000.0"),
        ({"bucket_bytes": True}, TypeError, "bucket_bytes must be an integer, got True"),
        ({"start_method": "thread"}, ValueError, "start_method must be one of popen, .* 'thread'"),
        ({"link": "moon"}, ValueError, "link must be one of wan, dsl, lan, datacentre, .* 'moon'"),
        ({"link": 100}, TypeError, "link must be a name such as 'wan', .* got 100"),
        ({"link": {"mbit_per_s": -1}}, ValueError, "mbit_per_s of a link must be positive .*-1"),
        ({"link": "no/links.yaml"}, FileNotFoundError, "There is no file of links 'no/links.yaml'"),
    ]
    for strategy in (LocalSGDStrategy, GASLoCStrategy):
        for settings, error, text in rows:
            name = strategy.__name__
            with subtests.test(name, **settings), pytest.raises(error, match=text):
                strategy(**settings)


def test_arguments_of_diloco(subtests: pytest.Subtests) -> None:
    for settings, text in (
        ({"outer_lr": 0.0}, "outer_lr must be positive, got 0.0"),
        ({"outer_lr": NAN}, "outer_lr must be positive, got nan"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_momentum": -0.1}, r"outer_momentum must be in \[0, 1\), got -0.1"),
    ):
        for strategy in (DiLoCoStrategy, AsyncDiLoCoStrategy):
            name = strategy.__name__
            with subtests.test(name, **settings), pytest.raises(ValueError, match=text):
                strategy(**settings)


def test_arguments_of_gasloc(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"outer_lr": -1.0}, "outer_lr must be positive, got -1.0"),
        ({"gossip_step": 0.0}, "gossip_step must be .* got 0.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\) or 'auto', got 1.0"),
        ({"momentum": "much"}, r"momentum must be in \[0, 1\) or 'auto', got 'much'"),
        ({"momentum_on": "drift"}, "momentum_on must be 'local' or 'gossiped', got 'drift'"),
    ]
    for settings, text in rows:
        with subtests.test(**settings), pytest.raises(ValueError, match=text):
            GASLoCStrategy(**settings)


def test_other_objects_than_algorithms() -> None:
    for algorithm in ("diloco", DiLoCo):
        with pytest.raises(TypeError, match=r"algorithm must be an Algorithm such as DiLoCo\(\)"):
            LocoStrategy(algorithm)  # type: ignore[arg-type]


def test_overlap_of_an_algorithm_without_outer_parameters() -> None:
    with pytest.raises(ValueError, match="overlap=True needs an algorithm with outer param"):
        LocoStrategy(LocalSGD(), overlap=True)


def test_overlap_with_unstable_momentum_warns() -> None:
    with pytest.warns(UserWarning, match=r"outer_momentum=0.9 is unstable .*\(0.2, 0.9\)"):
        Simulation([make_model()], DiLoCo(outer_momentum=0.9), overlap=True)


def test_hypercube_with_six_workers() -> None:
    models = [make_model() for _ in range(6)]
    with pytest.raises(ValueError, match="'hypercube' needs a power of two workers, got 6"):
        Simulation(models, GASLoC(), topology="hypercube")


# --------------------------------------------------------- at the start of Trainer.fit

TWO_PAIRS = [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
LOPSIDED = [[0.6, 0.4, 0.0], [0.0, 0.6, 0.4], [0.4, 0.0, 0.6]]
TOO_MUCH = [[0.5, 0.5, 0.5], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
FOR_TWO = [[0.5, 0.5], [0.5, 0.5]]
MAKE_STRATEGY: dict[str, tuple[Callable[[], LocoStrategy], type[Exception], str]] = {
    "unknown topology": (
        lambda: GASLoCStrategy("moebius"),
        ValueError,
        "moebius.*ring",
    ),
    "hypercube of three": (
        lambda: GASLoCStrategy("hypercube"),
        ValueError,
        "'hypercube' needs a power of two workers, got 3. Use .*, or run 2 or 4 workers",
    ),
    "disconnected graph": (
        lambda: GASLoCStrategy(nx.Graph({0: [1], 2: []})),
        ValueError,
        r"not connected: it falls into 2 parts, \[0, 1\], \[2\]",
    ),
    "disconnected matrix": (
        lambda: GASLoCStrategy(TWO_PAIRS),
        ValueError,
        r"not connected: it falls into 2 parts, \[0, 1\], \[2\]",
    ),
    "matrix that is not symmetric": (
        lambda: GASLoCStrategy(torch.tensor(LOPSIDED)),
        ValueError,
        r"not symmetric: entry \[0, 1\]",
    ),
    "matrix whose rows do not sum to 1": (
        lambda: GASLoCStrategy(TOO_MUCH),
        ValueError,
        "row 0 of the mixing matrix sums to 1.5, not to 1",
    ),
    "matrix for two workers": (
        lambda: GASLoCStrategy(FOR_TWO),
        ValueError,
        "made for 2 workers, got 3. Run 2 workers",
    ),
    "missing edge-list file": (
        lambda: GASLoCStrategy("no_such_folder/edges.txt"),
        (ValueError, FileNotFoundError),
        "no_such_folder",
    ),
    "topology for all-reduce": (
        lambda: LocoStrategy(DiLoCo(), topology="ring"),
        ValueError,
        "DiLoCo averages over all workers and takes no topology.*Drop topology",
    ),
    "gossip_step beyond the limit": (
        lambda: GASLoCStrategy("ring", gossip_step=4.0, momentum=0.0),
        ValueError,
        "gossip_step=4 with momentum=0 makes gossip .* of 3 workers diverge: .* below 2",
    ),
    "overlap with a single round": (
        lambda: AsyncDiLoCoStrategy(sync_every=6, fragments=None),
        ValueError,
        "sync_every=6: the result .* after the end of this run of 10 local steps.*at most 5",
    ),
    "two numbers for three workers": (
        lambda: LocalSGDStrategy(sync_every=[4, 2]),
        ValueError,
        r"sync_every lists 2 numbers for 3 workers, got \[4, 2\]",
    ),
    "empty list": (
        lambda: LocalSGDStrategy(sync_every=[]),
        ValueError,
        r"sync_every lists 0 numbers for 3 workers",
    ),
}


def fit(module: TinyModule, strategy: LocoStrategy, rank: int, **settings: Any) -> None:
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, **settings)
    trainer.fit(module, make_loader(rank, 10))


def outcome(
    module: TinyModule, strategy: Callable[[], LocoStrategy], rank: int
) -> tuple[type[Exception] | None, str]:
    """Return the error that ends a fit before its first step."""
    try:
        fit(module, strategy(), rank)
    except Exception as error:
        return type(error), "a training step was made" if module.losses else str(error)
    return None, "no error"


def fit_with_strategies(rank: int, world: int) -> list[tuple[type[Exception] | None, str]]:
    return [outcome(TinyModule(), make, rank) for make, *_ in MAKE_STRATEGY.values()]


def test_settings_are_refused_on_every_rank(pool: Pool, subtests: pytest.Subtests) -> None:
    found = pool.run(fit_with_strategies, world=3, timeout_s=60)
    for (case, (_, error, text)), *of_ranks in zip(MAKE_STRATEGY.items(), *found, strict=True):
        with subtests.test(case):
            for kind, message in of_ranks:
                assert kind is not None, message
                assert issubclass(kind, error), message
                assert re.search(text, message), message


class Net(nn.Sequential):
    """A net with the inputs and outputs of the small model, and other layers in between."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(nn.Linear(3, 4), *layers, nn.Linear(4, 1))
        self.double()


class TokenNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 1, sparse=True).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embedding(inputs[:, 0].long().clamp(0, 9))


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def partly_frozen() -> nn.Module:
    model = make_model()
    model[0].weight.requires_grad_(False)
    return model


def with_buffer(size: int) -> nn.Module:
    model = make_model()
    model.register_buffer("center", torch.zeros(size))
    return model


def with_complex() -> nn.Module:
    model = Net()
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


def renamed() -> nn.Module:
    first, activation, last = make_model()
    model = nn.Sequential()
    model.add_module("0", first)
    model.add_module("tanh", activation)
    model.add_module("head", last)
    return model


MAKE_MODEL: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "no trainable parameters": (
        lambda rank: frozen(make_model()),
        "no trainable parameters.*Set requires_grad=True",
    ),
    "sparse gradients": (
        lambda rank: TokenNet(),
        "'model.embedding' makes sparse gradients.*sparse=False",
    ),
    "lazy module": (
        lambda rank: Net(nn.LazyLinear(4)),
        "'model.1.weight' is not initialised yet .*configure_model",
    ),
    "complex parameters": (
        lambda rank: with_complex(),
        "'model.phase' has dtype torch.complex64",
    ),
    "bad on worker 1 only": (
        lambda rank: TokenNet() if rank == 1 else make_model(),
        "'model.embedding' makes sparse gradients",
    ),
    "another shape": (
        lambda rank: nn.Linear(3, 5 if rank == 2 else 4),
        r"Worker 2 holds a different model than worker 0: 'model.weight' has shape \(5, 3\) there "
        r"and \(4, 3\) on worker 0. Build the same model on every rank",
    ),
    "another name": (
        lambda rank: renamed() if rank == 1 else make_model(),
        "Worker 1 holds .* 'model.head.weight' where worker 0 has 'model.2.weight'",
    ),
    "another dtype": (
        lambda rank: make_model().float() if rank == 1 else make_model(),
        "Worker 1 holds .* 'model.0.weight' has dtype torch.float32 there and torch.float64 on",
    ),
    "another memory format": (
        lambda rank: nn.Conv2d(3, 2, 3).to(
            memory_format=torch.channels_last if rank else torch.contiguous_format
        ),
        "Worker 1 holds .* 'model.weight' has strides",
    ),
    "one more parameter": (
        lambda rank: Net(*[nn.Linear(4, 4)] * (rank == 2)) if rank else Net(),
        "Worker 2 holds",
    ),
    "longer": (
        lambda rank: nn.Sequential(*make_model(), *[nn.Linear(1, 1)] * (rank == 1)),
        "6 trainable parameters there and 4 on worker 0; the first extra one is 'model.3.weight' "
        "on that worker",
    ),
    "shorter": (
        lambda rank: make_model() if rank == 1 else nn.Sequential(*make_model(), nn.Linear(1, 1)),
        "4 trainable parameters there and 6 on worker 0; the first extra one is 'model.3.weight' "
        "on worker 0",
    ),
    "another buffer": (
        lambda rank: with_buffer(3 if rank == 1 else 2),
        r"Worker 1 holds .* 'model.center' has shape \(3,\) there and \(2,\) on worker 0",
    ),
    "one more buffer": (
        lambda rank: with_buffer(2) if rank == 2 else make_model(),
        "Worker 2 holds .* 5 parameters and buffers there and 4 on worker 0; .* 'model.center' on",
    ),
    "frozen on one worker": (
        lambda rank: partly_frozen() if rank == 1 else make_model(),
        "Worker 1 holds .* 'model.0.bias' where worker 0 has 'model.0.weight'",
    ),
}


def fit_with_models(rank: int, world: int) -> list[tuple[type[Exception] | None, str]]:
    found = []
    for make, _ in MAKE_MODEL.values():
        module = TinyModule()
        module.model = make(rank)
        found.append(outcome(module, lambda: LocalSGDStrategy(sync_every=2), rank))
    return found


def test_models_are_refused_on_every_rank(pool: Pool, subtests: pytest.Subtests) -> None:
    found = pool.run(fit_with_models, world=3, timeout_s=60)
    for (case, (_, text)), *of_ranks in zip(MAKE_MODEL.items(), *found, strict=True):
        with subtests.test(case):
            for kind, message in of_ranks:
                assert kind in (ValueError, TypeError), message
                assert re.search(text, message), message


def fit_with_sync_batchnorm(rank: int, world: int) -> str:
    module = TinyModule()
    with pytest.raises(MisconfigurationException) as caught:
        fit(module, LocalSGDStrategy(), rank, sync_batchnorm=True)
    assert not module.losses
    return str(caught.value)


def test_sync_batchnorm_is_refused_on_every_rank(pool: Pool) -> None:
    for message in pool.run(fit_with_sync_batchnorm, world=2, timeout_s=30):
        assert re.search(r"sync_batchnorm=True communicates .*sync_batchnorm=False", message)


def fit_after_a_mistake(rank: int, world: int) -> int:
    with pytest.raises(ValueError, match="moebius"):
        fit(TinyModule(), GASLoCStrategy("moebius"), rank)
    module = TinyModule()
    fit(module, GASLoCStrategy("ring", sync_every=5), rank)
    return len(module.losses)


def test_a_mistake_can_be_fixed_in_the_same_process(pool: Pool) -> None:
    assert pool.run(fit_after_a_mistake, world=2, timeout_s=30) == [10, 10]
