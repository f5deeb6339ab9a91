"""Mistakes are refused with one clear message, on every rank, before the first local step."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

import lightning_loco as loco
from lightning_loco import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DecoupledDiLoCoStrategy,
    DecoupledModelParallelStrategy,
    DiLoCo,
    DiLoCoStrategy,
    Elastic,
    GASLoC,
    GASLoCStrategy,
    LocalSGD,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
    Simulation,
    StreamingDiLoCoStrategy,
)
from lightning_loco.compression import ErrorFeedback, Int8, Sparse
from lightning_loco.strategies.replica_group import warn_of_straddling
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    make_loader,
    make_model,
    quiet_trainer,
)
from tests.harness.weight_averaging import EMAWeightAveraging, needs_weight_averaging
from tests.strategies.families import (
    ALL_METHODS,
    FAMILIES,
    Family,
    ShardedModule,
    fit_with,
    strategy_of,
)

NAN = math.nan
Errors = type[Exception] | tuple[type[Exception], ...]


# --------------------------------------------------------------------- at construction

SYNC_EVERY: list[tuple[Any, Errors, str]] = [
    (0, ValueError, "must be at least 1, got 0. Use sync_every=1"),
    (-3, ValueError, "must be at least 1, got -3"),
    ([4, 0], ValueError, r"must be at least 1, got \[4, 0\]"),
    (1.5, TypeError, "must be an integer .*, got 1.5"),
    (True, TypeError, "must be an integer .*, got True"),
    ("10", TypeError, "must be an integer .*, got '10'"),
    (None, TypeError, "must be an integer .*, got None"),
    ([4, 2.0], TypeError, r"must be an integer .*, got \[4, 2.0\]"),
]

OF_ALL: list[tuple[dict[str, Any], Errors, str]] = [
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

OF_DILOCO: list[tuple[dict[str, Any], Errors, str]] = [
    ({"outer_lr": 0.0}, ValueError, "outer_lr must be positive, got 0.0"),
    ({"outer_lr": NAN}, ValueError, "outer_lr must be positive, got nan"),
    ({"outer_momentum": 1.0}, ValueError, r"outer_momentum must be in \[0, 1\), got 1.0"),
    ({"outer_momentum": -0.1}, ValueError, r"outer_momentum must be in \[0, 1\), got -0.1"),
]
OF_GASLOC: list[tuple[dict[str, Any], Errors, str]] = [
    ({"outer_lr": -1.0}, ValueError, "outer_lr must be positive, got -1.0"),
    ({"gossip_step": 0.0}, ValueError, "gossip_step must be .* got 0.0"),
    ({"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\) or 'auto', got 1.0"),
    ({"momentum": "much"}, ValueError, r"momentum must be in \[0, 1\) or 'auto', got 'much'"),
    ({"momentum_on": "drift"}, ValueError, "must be 'local' or 'gossiped', got 'drift'"),
]
OF_FRAGMENTS: list[tuple[dict[str, Any], Errors, str]] = [
    ({"sync_every": 10, **arguments}, error, text)
    for arguments, error, text in [
        ({"fragments": 11}, ValueError, "from 1 to sync_every=10, got 11"),
        ({"delay": 11}, ValueError, "from 0 to sync_every=10, got 11"),
        ({"delay": -1}, ValueError, "from 0 to sync_every=10, got -1"),
        ({"delay": 1.0}, TypeError, "must be an integer, got 1.0"),
        ({"mix": 1.5}, ValueError, r"mix .* must be in \[0, 1\], got 1.5"),
        ({"mix": -0.1}, ValueError, r"mix .* must be in \[0, 1\], got -0.1"),
        ({"mix": NAN}, ValueError, r"mix .* must be in \[0, 1\], got nan"),
        ({"mix": "half"}, TypeError, "mix must be a number"),
        ({"outer_lr": 0.0}, ValueError, "outer_lr must be positive"),
    ]
]
OF_ASYNC: list[tuple[dict[str, Any], Errors, str]] = [
    (
        {"sync_every": {0: 10}},
        ValueError,
        "need one sync_every for the whole run, got {0: 10}",
    ),
    ({"fragments": "many"}, TypeError, "must be an integer, got 'many'"),
]
OF_STREAMING: list[tuple[dict[str, Any], Errors, str]] = [
    ({"sync_every": 10, "fragments": 0}, ValueError, "from 1 to sync_every=10, got 0"),
    ({"pattern": "odd"}, ValueError, "must be one of strided, contiguous, even, or a list"),
    ({"pattern": ["a"]}, ValueError, "lists 1 regular expressions for fragments=3"),
    ({"topology": "ring"}, TypeError, "topology"),
]
OF_CLOCK: list[tuple[dict[str, Any], Errors, str]] = [
    ({"interval_s": -0.1}, ValueError, "interval_s"),
    ({"warmup_steps": "3"}, TypeError, "warmup_steps"),
    ({"sync_every": 10}, TypeError, "sync_every"),
    ({"evaluate": "never"}, ValueError, "evaluate"),
]

OF_GOSSIP: list[tuple[dict[str, Any], Errors, str]] = [
    ({"fetch_probability": 1.5}, ValueError, "fetch_probability"),
    ({"interpolation": "age"}, ValueError, "interpolation"),
    ({"factor": -1}, ValueError, "factor"),
    ({"compression": "zip"}, ValueError, "compression must be one of none, bf16"),
    ({"compression": "int4"}, ValueError, "too roughly for gossip"),
    ({"compression": Sparse()}, ValueError, "too roughly for gossip"),
    ({"compression": ErrorFeedback(Int8())}, ValueError, "no error feedback"),
    ({"compression": torch.bfloat16}, TypeError, "a codec such as Int8"),
    ({"wire_dtype": "bfloat16"}, TypeError, "wire_dtype"),
    ({"nodes": "none.yaml"}, ValueError, "name"),
    ({"topology": "ring"}, TypeError, "topology"),
]

ROUGH = "too roughly for a remote optimizer"

OF_REMOTE: list[tuple[dict[str, Any], Errors, str]] = [
    ({"num_workers": 0}, ValueError, "num_workers must be at least 1"),
    ({"num_workers": 1.5}, TypeError, "num_workers must be an integer"),
    ({"num_workers": 2, "num_servers": 0}, ValueError, "num_servers must be at least 1"),
    ({"num_workers": 2, "replica_size": 0}, ValueError, "replica_size must be at least 1"),
    ({"compression": "zip"}, ValueError, "compression must be one of none, bf16"),
    ({"compression": 8}, TypeError, "compression must be a name, a codec such as Int8"),
    ({"compression": "e3m0"}, ValueError, ROUGH),
    ({"compression": ErrorFeedback(Sparse())}, ValueError, ROUGH),
    ({"compression": ErrorFeedback(Int8())}, ValueError, "codec alone: compression=Int8"),
    ({"num_workers": 2, "timeout_s": 0}, ValueError, "timeout_s must be positive"),
    ({"num_workers": 2, "bucket_bytes": 0}, ValueError, "bucket_bytes must be positive"),
    ({"num_wrokers": 2}, TypeError, "num_wrokers"),
]

REPLICA_SIZES: list[tuple[dict[str, Any], Errors, str]] = [
    (
        {"replica_size": 0},
        ValueError,
        "replica_size is the number of ranks of a worker and must be at least 1",
    ),
    ({"replica_size": 2.0}, TypeError, "replica_size must be an integer, or 'node'"),
    ({"replica_size": True}, TypeError, "replica_size must be an integer, or 'node'"),
    ({"replica_size": "nodes"}, TypeError, "got 'nodes'"),
]

NO_ALGORITHM = r"algorithm must be an Algorithm such as DiLoCo\(\)"
OF_LOCO: list[tuple[dict[str, Any], Errors, str]] = [
    ({"algorithm": "diloco"}, TypeError, NO_ALGORITHM),
    ({"algorithm": DiLoCo}, TypeError, NO_ALGORITHM),
    (
        {"algorithm": LocalSGD(), "overlap": True},
        ValueError,
        "overlap=True needs an algorithm with outer param",
    ),
    *(
        (
            {"algorithm": algorithm, "checkpoint_folder": "own"},
            ValueError,
            "checkpoint_folder must be one of shared, private",
        )
        for algorithm in (DiLoCo(), GASLoC(), LocalSGD())
    ),
]

OF_SHARDS: list[tuple[Any, tuple[Any, ...], Errors, str]] = [
    (PairwiseGossipStrategy(), (), TypeError, "a strategy with rounds such as DiLoCoStrategy"),
    (RemoteOptimizerStrategy(), (), TypeError, "method must be a strategy with rounds"),
    (LocoModelParallelStrategy(), (), TypeError, "method must be a strategy with rounds"),
    (DecoupledDiLoCoStrategy(), (), TypeError, "use DecoupledModelParallelStrategy"),
    ("diloco", (), TypeError, "method must be .*, got 'diloco'"),
    (DiLoCoStrategy(replica_size=2), (), ValueError, "Leave replica_size out"),
    (DiLoCoStrategy(replica_size="node"), (), ValueError, "Leave replica_size out"),
    (DiLoCoStrategy(checkpoint_folder="private"), (), ValueError, "checkpoint_folder='shared'"),
    (DiLoCoStrategy(static_graph=True), (), ValueError, "static_graph=True, which only DDP"),
    (DiLoCoStrategy(start_method="spawn"), (), ValueError, "start_method='spawn'"),
    (None, (0,), ValueError, "data_parallel_size is .* at least 1, got 0"),
    (None, (2, 0), ValueError, "tensor_parallel_size is .* at least 1, got 0"),
    (None, ("all",), TypeError, "data_parallel_size .* integer, got 'all'"),
    (None, (2, "auto"), TypeError, "tensor_parallel_size .* integer, got 'auto'"),
    (None, (True,), TypeError, "data_parallel_size .* integer, got True"),
]

ARGUMENTS: list[tuple[Callable[..., Any], list[tuple[dict[str, Any], Errors, str]]]] = [
    *((kind, OF_ALL) for kind in (LocalSGDStrategy, GASLoCStrategy)),
    *((kind, OF_DILOCO) for kind in (DiLoCoStrategy, AsyncDiLoCoStrategy)),
    (GASLoCStrategy, OF_GASLOC),
    *((kind, OF_FRAGMENTS) for kind in (AsyncDiLoCoStrategy, StreamingDiLoCoStrategy)),
    (AsyncDiLoCoStrategy, OF_ASYNC),
    (StreamingDiLoCoStrategy, OF_STREAMING),
    (AsyncModelAverageStrategy, OF_CLOCK),
    (PairwiseGossipStrategy, OF_GOSSIP),
    (RemoteOptimizerStrategy, OF_REMOTE),
    *((kind, REPLICA_SIZES) for kind in (LocalSGDStrategy, PairwiseGossipStrategy)),
    (LocoStrategy, OF_LOCO),
]


def test_arguments(subtests: pytest.Subtests) -> None:
    text = "sync_every counts optimizer steps between rounds and "
    of_steps = [({"sync_every": n}, error, text + end) for n, error, end in SYNC_EVERY]
    stepped = (LocalSGDStrategy, DiLoCoStrategy, AsyncDiLoCoStrategy)
    for kind, rows in [*ARGUMENTS, *((kind, of_steps) for kind in stepped)]:
        for arguments, error, match in rows:
            with (
                subtests.test(kind.__name__, arguments=arguments),
                pytest.raises(error, match=match),
            ):
                kind(**arguments)


def test_arguments_of_the_strategy_of_shards(subtests: pytest.Subtests) -> None:
    for method, sizes, error, message in OF_SHARDS:
        with subtests.test(message), pytest.raises(error, match=message):
            LocoModelParallelStrategy(method, *sizes)
    for method in (DiLoCoStrategy(), "decoupled_diloco"):
        with pytest.raises(TypeError, match="method must be a DecoupledDiLoCoStrategy"):
            DecoupledModelParallelStrategy(method)  # type: ignore[arg-type]


def test_the_method_and_its_plugins_are_used() -> None:
    class Io(loco.strategies.checkpoint.atomic_io.WholeFileIO):  # type: ignore[name-defined]
        pass

    method = DiLoCoStrategy(
        sync_every=7, timeout_s=11, summary=False, evaluate="outer", checkpoint_io=Io()
    )
    strategy = LocoModelParallelStrategy(method, 2, 3)
    assert strategy.settings is method.settings
    assert (strategy.timeout_s, strategy.summary, strategy.evaluate) == (11, False, "outer")
    assert isinstance(strategy.checkpoint_io, Io)
    assert strategy.replica_size == 6
    assert strategy.replica_arguments == "data_parallel_size=2, tensor_parallel_size=3"


def test_the_name_is_diloco_of_workers_of_one_node() -> None:
    strategy = quiet_trainer(strategy="loco_model_parallel", devices=4).strategy
    assert isinstance(strategy, LocoModelParallelStrategy)
    assert strategy.settings == DiLoCoStrategy().settings
    assert (strategy.data_parallel_size, strategy.tensor_parallel_size) == (4, 1)
    assert (strategy.num_workers, strategy.replica_size) == (1, 4)


def test_overlap_with_unstable_momentum_warns() -> None:
    with pytest.warns(UserWarning, match=r"outer_momentum=0.9 is unstable .*\(0.2, 0.9\)"):
        Simulation([make_model()], DiLoCo(outer_momentum=0.9), overlap=True)


def test_hypercube_with_six_workers() -> None:
    models = [make_model() for _ in range(6)]
    with pytest.raises(ValueError, match="'hypercube' needs a power of two workers, got 6"):
        Simulation(models, GASLoC(), topology="hypercube")


def test_a_worker_on_parts_of_two_nodes_is_warned_of() -> None:
    message = "^replica_size=2 makes .* ranks 2 to 3 are one worker on several nodes"
    with pytest.warns(UserWarning, match=message):
        warn_of_straddling(2, 3, "replica_size=2")
    for size, per_node in ((2, 4), (4, 2), (3, 3)):
        warn_of_straddling(size, per_node, "")  # a warning would raise an error


# --------------------------------------------------------- at the start of Trainer.fit


def of_rounds(rank: int) -> TinyModule:
    return TinyModule()


def with_model(make: Callable[[int], nn.Module]) -> Callable[[int], TinyModule]:
    """Return a function that creates a module with the model of a rank."""

    def of_rank(rank: int) -> TinyModule:
        module = TinyModule()
        module.model = make(rank)
        return module

    return of_rank


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A fit that ends with an error on every rank.

    Args:
        text: Pattern of the message.
        strategy: Creates the strategy.
        module: Creates the module of a rank.
        error: Class of the error.
        family: Determines the data of the ranks.
        world: Number of ranks.
        trainer: Creates further arguments of the Trainer.
        in_a_step: Whether the mistake shows only in a local step.
    """

    text: str
    strategy: Callable[[], Any] = functools.partial(LocalSGDStrategy, sync_every=2)
    module: Callable[[int], TinyModule] = of_rounds
    error: Errors = (ValueError, TypeError)
    family: Family = FAMILIES["rounds"]
    world: int = 3
    trainer: Callable[[], dict[str, Any]] = dict
    in_a_step: bool = False


def refuse(rank: int, world: int, names: Sequence[str]) -> list[tuple[type | None, str]]:
    """Return the errors that end some fits before their first step."""
    found: list[tuple[type | None, str]] = []
    for name in names:
        row = REFUSED[name]
        module = row.module(rank)
        data = [row.family.loader(rank, 10)]
        if isinstance(module, ValidatedModule):
            data.append(row.family.loader(rank, 2))
        try:
            fit_with(row.strategy(), module, *data, **row.trainer())
        except Exception as error:
            is_late = module.losses and not row.in_a_step
            text = "a training step was made" if is_late else str(error)
            found.append((type(error), text))
        else:
            found.append((None, "no error"))
    return found


def check_refused(pool: Pool, names: Sequence[str], subtests: pytest.Subtests) -> None:
    found = pool.run(refuse, names, world=REFUSED[names[0]].world, timeout_s=60)
    for name, *of_ranks in zip(names, *found, strict=True):
        with subtests.test(name):
            for kind, message in of_ranks:
                assert kind is not None, message
                assert issubclass(kind, REFUSED[name].error), (kind, message)
                assert re.search(REFUSED[name].text, message), message


TWO_PAIRS = [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
LOPSIDED = [[0.6, 0.4, 0.0], [0.0, 0.6, 0.4], [0.4, 0.0, 0.6]]
TOO_MUCH = [[0.5, 0.5, 0.5], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
FOR_TWO = [[0.5, 0.5], [0.5, 0.5]]

OF_STRATEGIES: dict[str, tuple[Callable[[], LocoStrategy], Errors, str]] = {
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
    "three fragments of two layers": (
        StreamingDiLoCoStrategy,
        ValueError,
        "more than the 2 layers",
    ),
    "a parameter in no fragment": (
        lambda: StreamingDiLoCoStrategy(10, 2, pattern=["weight", "2.bias"]),
        ValueError,
        "'model.0.bias' must match one pattern and matches none",
    ),
    "an optimizer of the whole vector": (
        lambda: StreamingDiLoCoStrategy(10, 2, outer_optimizer=torch.optim.AdamW),
        ValueError,
        "needs the whole vector of parameters at once .* Use fragments=1",
    ),
    "fragments and two numbers for three workers": (
        lambda: StreamingDiLoCoStrategy([10, 12], 2),
        ValueError,
        "lists 2 numbers for 3 workers",
    ),
    "a run too short for a whole phase": (
        lambda: AsyncDiLoCoStrategy(6, fragments=1),
        ValueError,
        "sync_every=6: the result of a round is applied one round later, after the end",
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


class Net(nn.Sequential):
    """A network with the inputs and outputs of the small model, and different layers in between."""

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


OF_MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
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


class OverAllRanks(ShardedModule):
    """Sharded over a mesh that the module itself has created."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class OtherLayout(ShardedModule):
    """Sharded by columns on the second worker."""

    hidden = 8

    def shard(self, mesh: DeviceMesh) -> None:
        def columns(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.shape == (1, 8) else None

        strategy: Any = self.trainer.strategy
        own = columns if strategy.worker == 1 else None
        fully_shard(self.model, mesh=mesh, shard_placement_fn=own)


class OneWhole(ShardedModule):
    """Not sharded on the second worker."""

    def shard(self, mesh: DeviceMesh) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.worker == 0:
            fully_shard(self.model, mesh=mesh)
        else:
            for name, parameter in list(self.model.named_parameters()):
                path, _, leaf = name.rpartition(".")
                whole = distribute_tensor(parameter, mesh, [Replicate()])
                setattr(self.model.get_submodule(path), leaf, nn.Parameter(whole))


class PartlySharded(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh)


class PartialSum(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model, mesh=mesh)
        made = DTensor.from_local(torch.ones(2, dtype=torch.float64), mesh, [Partial()])
        self.model.register_parameter("partial", nn.Parameter(made))


class Fsdp1Layer(FullyShardedDataParallel):
    """Stands in for FSDP1, which needs a GPU."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Fsdp1(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        super().shard(mesh)
        self.model.append(Fsdp1Layer())


class NoHook(ValidatedModule):
    """Has no ``configure_model``."""


class Averaging(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.average = AveragedModel(pl_module)


def averaging() -> list[Callback]:
    return [Averaging()]


def moving_average() -> list[Callback]:
    return [EMAWeightAveraging()]


def finder() -> list[Callback]:
    return [LearningRateFinder()]


def swa() -> list[Callback]:
    return [StochasticWeightAveraging(0.1)]


def pruning() -> list[Callback]:
    return [ModelPruning("l1_unstructured", amount=0.5)]


def momentum(**arguments: Any) -> LocoStrategy:
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    return DiLoCoStrategy(outer_optimizer=outer, **arguments)


class TwoOptimizers(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)


class Closure(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class HiddenClosure(TinyModule):
    """Its step requires a closure, although its signature has a default."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                closure()
            return super().step(closure)

    def configure_optimizers(self) -> Any:
        return self.Twice(self.parameters(), lr=0.1)


class OwnMethods(TinyModule):
    """Calls a method that only its optimizer has."""

    class Switched(torch.optim.SGD):
        def train(self) -> None:
            pass

    def configure_optimizers(self) -> Any:
        return self.Switched(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()


class OwnStep(TinyModule):
    """Steps the optimizer that it has created, not the one from Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.own = super().configure_optimizers()
        return self.own

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.own.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.own.step()


class BrokenHook(TinyModule):
    """Raises an error in a hook on one rank."""

    def configure_optimizers(self) -> Any:
        if self.trainer.global_rank == 1:
            raise KeyError("no such optimizer")
        return super().configure_optimizers()


class SparseTable(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)


class OtherModel(TinyModule):
    """Has another model on service ranks."""

    def setup(self, stage: str) -> None:
        if self.trainer.strategy.serves:  # type: ignore[attr-defined]
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()


class Complex(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class NoOptimizer(TinyModule):
    def configure_optimizers(self) -> Any:
        return None


class Collective(TinyModule):
    """Calls a collective before training."""

    def setup(self, stage: str) -> None:
        dist.barrier()


class Unfreezes(TinyModule):
    """Has a frozen parameter, and unfreezes it during training."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].weight.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.model[0].weight.requires_grad_(True)


class Replaces(TinyModule):
    """Replaces a parameter by another object."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            layer = self.model[0]
            layer.weight = nn.Parameter(layer.weight.detach().clone())


class AddsLate(TinyModule):
    """Adds a parameter to its optimizer during training."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.trainer.optimizers[0].add_param_group({"params": [self.late]})


class NoLoss(TinyModule):
    """Steps its optimizer by hand and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def sharded(
    text: str,
    module: Callable[[], TinyModule] = ShardedModule,
    sizes: tuple[int, int] = (2, 1),
    make: Callable[..., Any] = DiLoCoStrategy,
    callback: Callable[[], Callback] | None = None,
    error: Errors = ValueError,
) -> Refusal:
    family = Family(functools.partial(make, sync_every=3), sizes)
    return Refusal(
        text,
        family.strategy,
        lambda rank: module(),
        error,
        family,
        world=4,
        trainer=lambda: {} if callback is None else {"callbacks": [callback()]},
    )


def remote(
    text: str, module: Callable[[], TinyModule], *, servers: int = 1, **more: Any
) -> Refusal:
    return Refusal(
        text,
        functools.partial(RemoteOptimizerStrategy, 2, timeout_s=20),
        lambda rank: module(),
        Exception,
        world=2 + servers,
        **more,
    )


def synchronized() -> dict[str, Any]:
    return {"sync_batchnorm": True}


MEMBERS = Elastic("127.0.0.1:29510")
NODES = [{"name": "a", "host": "127.0.0.1", "port": 45671}]
OF_ROUNDS = {
    **{name: Refusal(row[2], row[0], error=row[1]) for name, row in OF_STRATEGIES.items()},
    **{name: Refusal(text, module=with_model(make)) for name, (make, text) in OF_MODELS.items()},
    "synchronized batch norm": Refusal(
        r"sync_batchnorm=True communicates .*sync_batchnorm=False",
        error=MisconfigurationException,
        trainer=synchronized,
    ),
    "ranks that are no multiple": Refusal(
        re.escape(
            "replica_size=2 does not divide the 3 ranks. Start a multiple of 2 "
            "(Trainer(devices=..., num_nodes=...)), or choose a replica_size that divides 3."
        ),
        functools.partial(LocalSGDStrategy, replica_size=2),
    ),
    "outer parameters that it has not": Refusal(
        "evaluate='outer' needs outer parameters.*LocalSGD",
        functools.partial(LocalSGDStrategy, evaluate="outer"),
    ),
    "a monitor of each worker's metric": Refusal(
        r"ModelCheckpoint\(monitor='val_loss'\)",
        functools.partial(DiLoCoStrategy, evaluate="local"),
        trainer=lambda: {
            "callbacks": [ModelCheckpoint(monitor="val_loss")],
            "enable_checkpointing": True,
        },
    ),
    "an unfrozen parameter": Refusal(
        "'model.0.weight' became trainable during fit.*Unfreeze before fit",
        module=lambda rank: Unfreezes(),
        error=RuntimeError,
        in_a_step=True,
    ),
}
OF_OTHERS = {
    "synchronized batch norm of ranks": Refusal(
        "sync_batchnorm=True",
        functools.partial(LocalSGDStrategy, replica_size=2),
        error=MisconfigurationException,
        world=2,
        trainer=synchronized,
    ),
    "late fragments of elastic members": Refusal(
        r"delay must be at most sync_every // fragments = 10 // 2 = 5, got 6\. Use delay=5",
        functools.partial(StreamingDiLoCoStrategy, 10, 2, 6, membership=MEMBERS),
        world=1,
    ),
    "a mapping for elastic members": Refusal(
        "after a fixed number of local steps. Use one number for sync_every",
        functools.partial(DiLoCoStrategy, {0: 10, 50: 20}, membership=MEMBERS),
        world=1,
    ),
    "nodes with several workers": Refusal(
        "devices=1",
        functools.partial(PairwiseGossipStrategy, nodes=NODES, name="a"),
        error=Exception,
        world=2,
    ),
    "a rule without its loss": Refusal(
        "returned no loss, but interpolation='loss'",
        functools.partial(PairwiseGossipStrategy, 1.0, "loss", timeout_s=20),
        lambda rank: NoLoss(),
        Exception,
        world=2,
        in_a_step=True,
    ),
    "an unfrozen parameter of gossip": Refusal(
        "became trainable during fit",
        functools.partial(PairwiseGossipStrategy, 1.0, timeout_s=20),
        lambda rank: Unfreezes(),
        RuntimeError,
        world=2,
        in_a_step=True,
    ),
    # A worker of two ranks that shard the model.
    "number of ranks": sharded(
        "= 3 ranks, but there are 4 ranks. Start a multiple of 3", sizes=(3, 1)
    ),
    "another mesh": sharded("is distributed over a mesh with rank", OverAllRanks),
    "other layouts": sharded("worker 0: .* on worker 0", OtherLayout),
    "whole copies on one worker": sharded("on worker 0", OneWhole),
    "parameters left out": sharded(
        "'model.2.weight' is not sharded over the data_parallel ranks", PartlySharded
    ),
    "partial sums": sharded("must not be a partial sum", PartialSum),
    "FSDP1": sharded("only supports the new FSDP2 APIs", Fsdp1, error=TypeError),
    "no configure_model": sharded("override .*configure_model", NoHook, error=TypeError),
    "the whole vector": sharded("needs the whole vector", make=momentum),
    "averaged copies": sharded("Averaging needs the whole", callback=Averaging),
    "stochastic averages": sharded(
        "StochasticWeightAveraging", callback=lambda: StochasticWeightAveraging(0.1)
    ),
    "a learning rate finder": sharded(
        "Find the learning rate with a strategy with replica_size=", callback=LearningRateFinder
    ),
    "pruning": sharded(
        "ModelPruning needs the whole model",
        sizes=(1, 2),
        callback=lambda: ModelPruning("l1_unstructured", amount=0.5),
    ),
    # A remote optimizer.
    "two optimizers": remote("needs exactly one optimizer", TwoOptimizers),
    "a closure": remote("LBFGS needs a closure", Closure),
    "a hidden closure": remote(
        r"Twice.step\(\) has failed without a closure", HiddenClosure, in_a_step=True
    ),
    "own methods": remote("'train' of Switched cannot be used here", OwnMethods),
    "own step": remote(r"Call the step of self.optimizers\(\)", OwnStep, in_a_step=True),
    "a sparse table": remote("sparse", SparseTable),
    "a learning rate finder, remote": remote(
        "LearningRateFinder and Tuner.lr_find do not work with",
        TinyModule,
        trainer=lambda: {"callbacks": [LearningRateFinder(num_training_steps=3)]},
    ),
    "an error in a hook": remote("no such optimizer", BrokenHook),
    "another model on a server": remote("Build the same|Another model", OtherModel),
    "a wrong number of ranks": Refusal(
        r"need 4 ranks \(2 tiers.*or 5 \(3 tiers",
        functools.partial(RemoteOptimizerStrategy, 3, timeout_s=20),
        error=Exception,
    ),
    **{
        f"{name}, {2 + servers} ranks": remote(text, module, servers=servers)
        for servers in (1, 2)
        for name, text, module in (
            ("a complex parameter", "Parameter 'phase' is complex", Complex),
            ("no optimizer", "NoOptimizer gives none", NoOptimizer),
            ("a collective", "process group", Collective),
        )
    },
}
REPLACED = (
    r"Parameter 'model.0.weight' was replaced by another(.|\n)*parameter.data.copy_\(values\)"
)
ADDED = "Parameter 'late' was given to an optimizer during fit"
OF_METHODS = {
    f"{what}, {name}": Refusal(
        text,
        functools.partial(strategy_of, name),
        lambda rank, module=module: module(),  # type: ignore[misc]
        RuntimeError,
        world=2,
        in_a_step=True,
    )
    for what, text, module, names in (
        ("a replaced parameter", REPLACED, Replaces, ALL_METHODS),
        (
            "a parameter that is added to an optimizer",
            ADDED,
            AddsLate,
            ["diloco", "streaming_diloco", "async_model_average", "pairwise_gossip"],
        ),
    )
    for name in names
}
AVERAGES = "a moving average, before the model is copied"
REFUSED = {
    **OF_ROUNDS,
    **OF_OTHERS,
    **OF_METHODS,
    AVERAGES: sharded(
        "^EMAWeightAveraging needs the whole model on every rank", callback=EMAWeightAveraging
    ),
}


@pytest.mark.parametrize("names", [[*OF_ROUNDS], [*OF_METHODS]], ids=["rounds", "methods"])
def test_fits_in_one_process(pool: Pool, names: list[str], subtests: pytest.Subtests) -> None:
    check_refused(pool, names, subtests)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.* returned `None`:UserWarning")
@pytest.mark.parametrize("name", OF_OTHERS)
def test_fits(pool: Pool, name: str, subtests: pytest.Subtests) -> None:
    check_refused(pool, [name], subtests)
    if "collective" in name:
        for rank, ((_, message),) in enumerate(pool.run(refuse, [name], world=REFUSED[name].world)):
            assert ("trainer.strategy.serves" in message) or rank >= 2


@needs_weight_averaging
def test_a_moving_average(pool: Pool, subtests: pytest.Subtests) -> None:
    check_refused(pool, [AVERAGES], subtests)


def fit_after_a_mistake(rank: int, world: int) -> int:
    module = TinyModule()
    for topology in ("moebius", "ring"):
        trainer = make_trainer(
            GASLoCStrategy(topology, sync_every=5), max_epochs=1, use_distributed_sampler=False
        )
        if topology == "moebius":
            with pytest.raises(ValueError, match="moebius"):
                trainer.fit(module, make_loader(rank, 10))
        else:
            trainer.fit(module, make_loader(rank, 10))
    return len(module.losses)


def test_a_mistake_can_be_fixed_in_the_same_process(pool: Pool) -> None:
    assert pool.run(fit_after_a_mistake, world=2, timeout_s=30) == [10, 10]
