"""Pairwise gossip: real engines, nodes, servers and clients, on a model of TCP and of threads."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from lightning_loco.algorithms.pairwise_average import PairwiseAverage
from lightning_loco.compression import Int8
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.gossip import engine as engine_module
from lightning_loco.gossip import fetch_decisions, peer_selection
from lightning_loco.gossip import node as node_module
from lightning_loco.gossip.peer_selection import NodeListDiscovery, Peer, StoreDiscovery
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshots import make_publisher
from lightning_loco.model.fingerprint import schema_checksum
from lightning_loco.model.flat import Chunk, FlatLayout
from lightning_loco.model.worker import EarlierRun
from lightning_loco.simulation.family import make_worker
from tests.exploration import gossip_observers as observers
from tests.exploration.background_tasks import Threads
from tests.exploration.model_sockets import HOST, Sockets, pairs
from tests.exploration.records import Exchanged, Resumed
from tests.exploration.scheduler import Fault
from tests.exploration.world import World

CHUNK = 3
"""Parameters in a chunk, of eight, and of those in one reception four bytes each."""

SCORES = {
    "MIN_SCORE": 1,
    "MAX_SCORE": 12,
    "_SUCCESS_POINTS": 1,
    "_FAILURE_POINTS": 4,
}
"""Points of peers as in the package, but so few that they matter within a short run."""

SPOILS = tuple(observers.SPOILS)
TOLD = {"leave": "leaves", "diverge": "diverges", "reset": "resets"}
"""What a node may be told to do, and the attribute of it that says so."""

KINDS = ("kill", "vanish", "freeze", "cut", *TOLD, *(f"spoil-{s}" for s in SPOILS))
STEP_CHANGE = 0.1
LAST_STEP_S = 0.05
CODECS = {"none": None, "bf16": "bf16", "int8": Int8(block=8)}


class Model(nn.Module):
    """Eight numbers; ``name`` is that of one parameter, so another name is another model."""

    def __init__(self, name: str = "bias") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5))
        self.register_parameter(name, nn.Parameter(torch.ones(2)))
        self.register_buffer("mean", torch.zeros(1))


class Node:
    """One life of a node: the process that trains, from its start to its end.

    Attributes:
        number: Number of its host.
        name: Name of its host, which is also that of the peer.
        life: How often the host has started.
        peers: Whose parameters it has received since the faults ended.
    """

    def __init__(self, world: GossipWorld, number: int, life: int) -> None:
        self.world, self.number, self.life = world, number, life
        self.name = world.names[number]
        self.steps = 0
        self.leaves = self.diverges = self.resets = False
        self.peers: set[str] = set()
        self.model = Model("other" if self.name in world.strangers else "bias")
        self._draw = torch.Generator().manual_seed(100 * number + life)

    @property
    def has_link(self) -> bool:
        """Whether its fetches take as long as on an emulated link."""
        return self.number == 0 and self.world.settings["has_link"]

    @property
    def values(self) -> tuple[float, ...]:
        """The parameters and buffers."""
        tensors = [*self.model.parameters(), self.model.mean]
        return tuple(torch.cat([tensor.detach() for tensor in tensors]).tolist())

    def run(self) -> None:
        """Train until all have exchanged, or it is asked to leave."""
        world, clock = self.world, self.world.clock
        group = WorkerGroup(0, 1, clock=clock)
        draw = random.Random(100 * self.number + self.life).random
        engine = observers.Engine.of_worker(
            make_worker(self.model, group, world.gossip), world.gossip, self.connect, draw
        )
        engine.observe(self)
        if world.settings["resumes"] and (saved := world.saved.get(self.name)) is not None:
            state, values = saved
            engine.resume_from(
                EarlierRun(copy.deepcopy(state), "PairwiseAverage", world.gossip.describe(), True)
            )
            world.history.add(Resumed(self.name, values, self.values))
        while not self.leaves and not world.is_over:
            engine.update_send(1.0 + 1 / (1 + self.steps))
            if self.leaves or world.is_over:
                break
            clock.sleep(self.step_s)
            self.step()
            engine.count_step()
            if world.settings["waits"]:
                engine.update_wait()
            elif engine.check_due():
                engine.make_round()
            if self.resets:
                self.resets = False
                engine.reset()
            if self.steps % 3 == 0 and self.is_finite:
                world.saved[self.name] = copy.deepcopy(engine.state_dict()), self.values
        engine.close()

    @property
    def step_s(self) -> float:
        """How long its next step takes: at last some time, so that waits of others end."""
        seconds: float = self.world.settings["step_s"]
        is_last = self.steps >= self.world.settings["steps"]
        return LAST_STEP_S if is_last and not seconds else seconds

    @property
    def is_finite(self) -> bool:
        """Whether the model holds no NaN."""
        return all(value == value for value in self.values)

    @torch.no_grad()
    def step(self) -> None:
        """Change the model by other numbers each time, or by NaN."""
        self.steps += 1
        for tensor in [*self.model.parameters(), self.model.mean]:
            change = torch.rand(tensor.shape, generator=self._draw) - 0.5
            tensor.add_(STEP_CHANGE * change * (torch.nan if self.diverges else 1.0))
        self.diverges = False

    def connect(self, layout: FlatLayout) -> tuple[node_module.PeerNode, Any]:
        """Open the node as ``open_node`` does, with the network of this world."""
        world = self.world
        discovery: Any
        if world.settings["has_store"]:
            discovery = StoreDiscovery(world.store, self.number, len(world.names))
        else:
            peers = [Peer(n, HOST, p) for n, p in zip(world.names, world.ports, strict=True)]
            discovery = NodeListDiscovery(peers, self.name)
        opened = observers.ObservedNode(
            layout.numel,
            layout.dtype,
            discovery,
            schema_checksum=schema_checksum(layout.schema()),
            compression=world.gossip.codec,
            fetch_timeout_s=world.gossip.fetch_timeout_s,
            seed=self.number + 100 * self.life,
            emulated_duration=world.emulated_duration if self.has_link else None,
            clock=world.clock,
        )
        opened.observe(self)
        return opened, make_publisher(opened.snapshots, layout, world.clock)


class GossipWorld(World):
    """Some nodes train, fetch and blend, while others fail, return, freeze or send nonsense.

    It is over when, after the last fault, each node has received the parameters of each other one.
    """

    name = "gossip"
    covered = (
        "lightning_loco.gossip.engine",
        "lightning_loco.gossip.averaging",
        "lightning_loco.gossip.fetch_decisions",
        "lightning_loco.gossip.fetcher",
        "lightning_loco.gossip.node",
        "lightning_loco.gossip.peer_selection",
        "lightning_loco.gossip.protocol",
        "lightning_loco.gossip.snapshot_server",
        "lightning_loco.gossip.snapshots",
        "lightning_loco.transport.client",
        "lightning_loco.transport.connection",
        "lightning_loco.transport.request_server",
        "lightning_loco._util.background",
    )
    limit_s: ClassVar[float] = 600.0
    max_events: ClassVar[int] = 30_000

    @classmethod
    def draw(cls, draw: random.Random) -> dict[str, Any]:
        nodes = draw.choice([2, 2, 3, 3, 3, 4, 5])
        drawn = {
            "nodes": nodes,
            "steps": draw.choice([2, 4, 8]),
            "step_s": draw.choice([0.02, 0.05, 0.15, 0.4]),
            "fetch_timeout_s": draw.choice([0.25, 1.0]),
            "piece_bytes": draw.choice([24, 40]),
            "fetch_probability": draw.choice([0.5, 1.0, 1.0]),
            "interpolation": draw.choice(["constant", "constant", "clock", "loss"]),
            "divergence_threshold": draw.choice([0.0, 0.0, 2.0]),
            "keep_progress": draw.random() < 0.5,
            "compression": draw.choice([*CODECS]),
            "waits": draw.random() < 0.5,
            "has_store": draw.random() < 0.5,
            "has_link": draw.random() < 0.2,
            "has_stranger": nodes > 2 and draw.random() < 0.2,
            "resumes": draw.random() < 0.5,
            "ends_cut": draw.random() < 0.5,
            "faults": [kind for kind in KINDS if draw.random() < 0.4],
        }
        # Situations that are rare otherwise.
        wanted: dict[str, Any] = {}
        focus = draw.choice(["", "", "one", "one", "one", "slow", "silent"])
        if focus == "one":  # kind of fault, and no other ones
            wanted = {"faults": [draw.choice(KINDS)]}
        elif focus == "slow":
            # Parameters are still being sent to several peers when three more are published.
            wanted = {"nodes": draw.choice([4, 5]), "has_stranger": False, "steps": 8}
            wanted |= {"step_s": 0.0, "piece_bytes": 8, "compression": "none", "waits": False}
            wanted |= {"fetch_probability": 1.0, "fetch_timeout_s": 1.0, "faults": []}
            wanted |= {"has_link": False}  # it has thousands of events without one
        elif focus == "silent":
            # A node is closed while the peer from which it fetches does not answer.
            silent = draw.choice(["freeze", "cut", "vanish", "spoil-silent"])
            wanted = {"faults": ["leave", silent], "waits": False, "ends_cut": True}
            wanted |= {"fetch_probability": 1.0, "fetch_timeout_s": 1.0}
        return drawn | wanted

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._patches = ExitStack()
        self.names = [peer_selection.worker_name(n) for n in range(settings["nodes"])]
        self.strangers = self.names[-1:] if settings["has_stranger"] else []
        self.gossip = PairwiseSettings(
            PairwiseAverage(
                settings["fetch_probability"],
                settings["interpolation"],
                0.4,
                settings["divergence_threshold"],
                settings["keep_progress"],
            ),
            fetch_timeout_s=settings["fetch_timeout_s"],
            compression=CODECS[settings["compression"]],
        )
        self.saved: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {}
        self.spoils: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}
        self.lives = dict.fromkeys(self.names, 0)
        self.is_calm = False
        self._durations = random.Random(0)

    # ------------------------------------------------------------------------- a run

    def start(self) -> None:
        scheduler = self.scheduler
        scheduler.after_event = self._go_on
        self.clock = scheduler.clock()
        self.sockets, self.store = Sockets(scheduler, self.settings["piece_bytes"]), HashStore()
        self.ports = [self.sockets.free_port() for _ in self.names]
        changes: list[tuple[Any, dict[str, Any]]] = [
            (fetch_decisions, {"CHUNK_BYTES": 4 * CHUNK}),
            (engine_module, {"CHUNK_ELEMENTS": CHUNK}),
            (peer_selection, SCORES),
            (node_module, observers.replaced(self)),
            (Chunk, {"pack": self._yielding(Chunk.pack), "unpack": self._yielding(Chunk.unpack)}),
        ]
        for target, change in changes:
            self._patches.enter_context(mock.patch.multiple(target, **change))
        self._patches.enter_context(self.sockets.patched())
        self._patches.enter_context(Threads(scheduler).patched())
        for number in range(len(self.names)):
            self._start_node(number)
        scheduler.start("the end", lambda: scheduler.wait("the end", lambda: self.is_over))

    def _yielding(self, function: Any) -> Any:
        """Let other threads run before a chunk is copied."""

        @functools.wraps(function)
        def copy_chunk(chunk: Chunk, flat: Tensor) -> None:
            if self.scheduler.is_in_task:
                self.scheduler.wait("a chunk")
            function(chunk, flat)

        return copy_chunk

    def _start_node(self, number: int) -> None:
        name = self.names[number]
        self.lives[name] += 1
        self.scheduler.revive(name)
        self.sockets.restart(name)
        self.nodes[name] = node = Node(self, number, self.lives[name])
        self.scheduler.start(f"{name} train {node.life}", functools.partial(self._run, node), name)

    def _run(self, node: Node) -> None:
        node.run()
        if self.nodes.get(node.name) is node and not self.is_over:  # it has left
            del self.nodes[node.name]
            if self.is_calm:
                self._start_node(node.number)

    def emulated_duration(self, peer: str, num_bytes: int, count: int) -> float:
        """How long a fetch takes on a link, sometimes longer than is allowed."""
        longest = 0.2 if self.is_calm else 1.2
        return self._durations.uniform(0, longest * self.settings["fetch_timeout_s"])

    def _go_on(self) -> None:
        """Once the nodes have made their steps, repair everything, and wait until all exchange."""
        if self.is_over and self.settings["ends_cut"] and not self.sockets.cut:
            for one, other in pairs(self.names):
                self.sockets.cut_off(one, other)
        if self.is_calm or any(node.steps < self.settings["steps"] for node in self.nodes.values()):
            return
        self.is_calm = self.scheduler.is_prompt = True
        self.history.add(observers.Calm())
        for name in self.names:
            self.scheduler.thaw(name)
        for one, other in sorted(self.sockets.cut):
            self.sockets.heal(one, other)
        self.spoils.clear()
        for node in self.nodes.values():
            node.leaves = node.diverges = node.resets = False
        for number, name in enumerate(self.names):
            if name not in self.nodes:
                self._start_node(number)

    @property
    def is_over(self) -> bool:
        """Whether each node has received from each other one of the same model."""
        alike = {*self.names} - {*self.strangers}
        return self.is_calm and all(
            name in self.strangers or node.peers >= alike - {name}
            for name, node in self.nodes.items()
        )

    def received(self, node: Node, exchanged: Exchanged) -> None:
        """Note whose parameters a node has blended in."""
        self.history.add(exchanged)
        if self.is_calm:
            node.peers.add(exchanged.peer)

    # ------------------------------------------------------------------------- faults

    def faults(self) -> Mapping[str, Fault]:
        if self.is_calm:
            return {}
        kinds, found = self.settings["faults"], dict[str, Fault]()
        scheduler = self.scheduler
        for number, name in enumerate(self.names):
            node = self.nodes.get(name)
            if node is None:
                found[f"start {name}"] = Fault(functools.partial(self._start_node, number), True)
                continue
            if scheduler.is_frozen(name):
                found[f"thaw {name}"] = Fault(functools.partial(scheduler.thaw, name), True)
            elif "freeze" in kinds:
                found[f"freeze {name}"] = Fault(functools.partial(scheduler.freeze, name))
            for kind in ("kill", "vanish"):
                if kind in kinds:
                    found[f"{kind} {name}"] = Fault(functools.partial(self._end_node, name, kind))
            for kind in TOLD:
                if kind in kinds:
                    found[f"{kind} {name}"] = Fault(functools.partial(self._tell, node, kind))
            for spoil in SPOILS:
                if f"spoil-{spoil}" in kinds and name not in self.spoils:
                    set_spoil = functools.partial(self.spoils.__setitem__, name, spoil)
                    found[f"spoil {name} {spoil}"] = Fault(set_spoil)
        for one, other in pairs(self.names):
            if (one, other) in self.sockets.cut:
                heal = functools.partial(self.sockets.heal, one, other)
                found[f"heal {one} {other}"] = Fault(heal, True)
            elif "cut" in kinds:
                cut = functools.partial(self.sockets.cut_off, one, other)
                found[f"cut {one} {other}"] = Fault(cut)
        return found

    def _end_node(self, name: str, kind: str) -> None:
        del self.nodes[name]
        self.sockets.end(name, says_so=kind == "kill")
        self.scheduler.kill(name)

    def _tell(self, node: Node, kind: str) -> None:
        setattr(node, TOLD[kind], True)

    def close(self) -> None:
        self._patches.close()
