"""The worlds by name."""

from __future__ import annotations

from tests.exploration.gossip_world import GossipWorld
from tests.exploration.members_world import MembersWorld
from tests.exploration.rounds_world import RoundsWorld
from tests.exploration.saves_world import SavesWorld
from tests.exploration.world import World

WORLDS: dict[str, type[World]] = {
    kind.name: kind
    for kind in (
        GossipWorld,
        MembersWorld,
        RoundsWorld,
        SavesWorld,
    )
}
