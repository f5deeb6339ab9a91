"""Defects that are put back into the real code of gossip, one at a time; exploration finds each."""

from __future__ import annotations

from tests.exploration.mutants import Mutant

_GOSSIP = "lightning_loco.gossip"

MUTANTS = [
    Mutant(
        "a snapshot that is being sent is overwritten",
        f"{_GOSSIP}.snapshots.Snapshots.wire_buffer",
        "s is not self._latest and not s.readers",
        "s is not self._latest",
    ),
    Mutant(
        "a snapshot stays reserved after it was sent",
        f"{_GOSSIP}.snapshots.Snapshots.reading",
        "snapshot.readers -= 1",
        "pass",
    ),
    Mutant(
        "the latest snapshot is overwritten while it may be asked for",
        f"{_GOSSIP}.snapshots.Snapshots.wire_buffer",
        "s is not self._latest and not s.readers",
        "not s.readers",
    ),
    Mutant(
        "infinite parameters are accepted",
        f"{_GOSSIP}.fetch_decisions.ParameterCheck.update",
        "if not math.isfinite(squares):",
        "squares = 0.0\n    if False:",
    ),
    Mutant(
        "too large parameters are accepted",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._fetch_from",
        "if check.norm <= check.max_norm:",
        "if True:",
    ),
    Mutant(
        "a peer may be silent beyond the deadline",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._limit",
        "min(deadline, self.clock.now() + limit_s)",
        "self.clock.now() + limit_s",
    ),
    Mutant(
        "the tag is that of the reply before",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._fetch_from",
        "self._tag = header.tag",
        "self._tag = self.__dict__.setdefault('first', header.tag)",
    ),
    Mutant(
        "a peer loses points for the end of this node",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._try_peer",
        "if self.is_stopped:",
        "if False:",
    ),
    Mutant(
        "a connection with unread bytes is used again",
        "lightning_loco.transport.connection.Connection.is_idle",
        "self._body_left == 0 and not poll.poll(0)",
        "True",
    ),
    Mutant(
        "a connection is kept after a timeout",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._try_peer",
        "if outcome in (_Outcome.TIMEOUT, _Outcome.REFUSED, _Outcome.ERROR):",
        "if False:",
    ),
    Mutant(
        "the address of a peer that has returned is not looked up again",
        f"{_GOSSIP}.peer_selection.StoreDiscovery.forget",
        "self._outdated.add(name)",
        "pass",
    ),
    Mutant(
        "a model with NaN is published",
        f"{_GOSSIP}.snapshots.Publisher.publish",
        "if self.was_finite:",
        "if True:",
    ),
    Mutant(
        "a fetch that was waited for is blended once more",
        f"{_GOSSIP}.engine.PairwiseEngine._blend",
        "self._peer = self._received = None",
        "pass",
    ),
    Mutant(
        "what was received before a reset is blended after it",
        f"{_GOSSIP}.engine.PairwiseEngine.reset",
        "node.wait()",
        "self._received = node.wait()",
    ),
    Mutant(
        "the clock is not averaged",
        f"{_GOSSIP}.engine.PairwiseEngine._blend",
        "self._clock = self.algorithm.blended_clock(own.clock, peer.clock, factor)",
        "pass",
    ),
    Mutant(
        "peers that are passed over gain no points",
        f"{_GOSSIP}.peer_selection.PeerSelector.choose",
        "self._add(name, _NOT_CHOSEN_POINTS)",
        "pass",
    ),
    Mutant(
        "closing does not abort the fetch",
        f"{_GOSSIP}.fetcher.Fetcher.stop",
        "client.abort()",
        "pass",
    ),
    Mutant(
        "a reply of another model is accepted",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._parse",
        "if has_parameters and header.model_id != self._model_id:",
        "if False:",
    ),
    Mutant(
        "the progress since the start of a fetch is lost",
        f"{_GOSSIP}.averaging.ModelAverager.blend",
        "base = self._at_fetch_start if was_finite else None",
        "base = None",
    ),
    Mutant(
        "the share of a peer is not limited to 1",
        "lightning_loco.algorithms.pairwise_average.PairwiseAverage.blend_factor",
        "return min(max(factor, 0.0), 1.0)",
        "return 3 * factor",
    ),
    Mutant(
        "fetches on an emulated link are counted twice",
        f"{_GOSSIP}.fetch_decisions.FetchDecisions._delay",
        "self.counts.fetches -= 1",
        "pass",
    ),
]
