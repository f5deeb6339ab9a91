"""Sets up what carries the flights of an engine."""

from __future__ import annotations

import json
import secrets
import socket
from typing import Any, cast

from lightning_loco.elastic.carriers import Carrier, Summing
from lightning_loco.elastic.consistency import Consistency, fingerprint
from lightning_loco.elastic.elastic import Elastic
from lightning_loco.elastic.flights import Flights
from lightning_loco.elastic.gossip import Mixing
from lightning_loco.elastic.groups import Groups
from lightning_loco.elastic.lighthouse import Lighthouse, address_towards
from lightning_loco.elastic.sharing import DataShare
from lightning_loco.elastic.state import outer_state
from lightning_loco.rounds.engine import Engine

_OWN_AFFAIRS = ("sync_every", "bucket_bytes")


def begin_flights(asked: Elastic, engine: Engine, share: DataShare) -> Flights:
    """Begin to carry flights; the lighthouse need not be there before the first one."""
    name = f"{asked.name or socket.gethostname()}-{secrets.token_hex(4)}"
    lighthouse = Lighthouse(asked.lighthouse, name)
    groups = Groups(asked.host or address_towards(asked.lighthouse), asked.timeout_s)
    sums = engine.settings.algorithm.exchange == "mean"
    carrier: Carrier = Summing(groups, engine) if sums else Mixing(groups, engine)
    flights = Flights(
        lighthouse,
        lambda: engine.worker.stop.requested is not None,
        groups,
        carrier,
        {**describe(engine), "check_every": asked.check_every or 0, "num_samples": share.sizes},
        share=share,
        min_workers=asked.min_workers,
        timeout_s=asked.timeout_s,
        consistency=Consistency(
            engine.settings.algorithm.replicated and asked.check_every or 0,
            lambda: fingerprint(outer_state(engine)),
        ),
    )
    flights.start()
    return flights


def describe(engine: Engine) -> dict[str, Any]:
    """What must be equal on all workers, as plain values."""
    settings = engine.settings.describe()
    told = {key: value for key, value in settings.items() if key not in _OWN_AFFAIRS}
    told["parameters"] = engine.worker.replica.layout.schema()
    return cast(dict[str, Any], json.loads(json.dumps(told, default=str)))
