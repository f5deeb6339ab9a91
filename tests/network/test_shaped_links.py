"""Predicted and emulated times, compared with real links of that rate: namespaces and tc.

The fastest of a few rounds counts, on a link so slow that delays of a busy machine are small.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_loco import Link, Simulation
from lightning_loco.costs import Links, LinkTimes, as_links
from lightning_loco.topology import Ring
from lightning_loco.transport import write_certificate
from tests.harness.networks import Network, wired_together
from tests.network.worker import METHODS, Numbers

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.alone]

NUMEL = 1_000_000
BYTES = 4 * NUMEL
MBIT_PER_S = 50
RATE = Link(mbit_per_s=MBIT_PER_S)
TIMES = 4
LIMIT_S = 120.0

WORKER = "import sys; from tests.network.worker import main; main(sys.argv[1:])"


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    with wired_together(getattr(request, "param", 3), tmp_path) as wired:
        yield wired


def measure(network: Network, method: str, link: Any = None, **others: Any) -> list[float]:
    """Return the seconds of the fastest round or fetch of each worker."""
    words = {"method": method, "world": len(network.spaces), "numel": NUMEL, "times": TIMES}
    words |= {"link": json.dumps(link), **others}
    programs = []
    for rank in range(len(network.spaces)):
        options = [f"--{name}={value}" for name, value in {**words, "rank": rank}.items()]
        programs.append(network.run(rank, sys.executable, "-c", WORKER, *options))
    lines = [program.wait_for("seconds ").splitlines()[-1] for program in programs]
    found = [json.loads(line.removeprefix("seconds ")) for line in lines]
    assert [len(seconds) for seconds in found] == [TIMES] * len(programs)
    for program in programs if method != "pairwise" else ():  # these serve until they are killed
        assert program.finish(LIMIT_S)[0] == 0
    return [min(seconds) for seconds in found]


def check(found: list[float], predicted: float, part: float = 0.3) -> None:
    """Check that measured times equal the predicted ones up to a relative error."""
    for seconds in found:
        assert abs(seconds - predicted) <= part * predicted, (found, predicted)


@pytest.mark.parametrize("network", [2, 3], indirect=True)
@pytest.mark.parametrize("method", ["diloco", "gasloc"])
def test_simulated_rounds_take_as_long_as_on_slow_links(network: Network, method: str) -> None:
    """Within 20 %, for simulated rounds with the links and parameters of the real workers."""
    world = len(network.spaces)
    models = [Numbers(NUMEL, rank) for rank in range(world)]
    simulation = Simulation(models, METHODS[method](), links=RATE)
    simulation.run(lambda worker: None, TIMES)
    network.slow_down(f"{MBIT_PER_S}mbit")
    check(measure(network, method), max(simulation.time_s) / TIMES, part=0.2)


@pytest.mark.parametrize("network", [2, 3], indirect=True)
def test_a_round_of_diloco_takes_as_long_as_predicted(network: Network) -> None:
    """On a slow link, and with the emulator on a link without a limit."""
    world = len(network.spaces)
    sent = 2 * (world - 1) / world * BYTES
    predicted = LinkTimes(Links(RATE), world).mean(sent, 2 * (world - 1), 0).seconds
    check(measure(network, "diloco", {"mbit_per_s": MBIT_PER_S}), predicted)
    network.slow_down(f"{MBIT_PER_S}mbit")
    check(measure(network, "diloco"), predicted)


def test_a_round_of_gasloc_takes_as_long_as_predicted(network: Network) -> None:
    """Each of three workers sends two messages."""
    predicted = LinkTimes(Links(RATE), 3).all_neighbors(BYTES, Ring(), 0).of_worker(0).seconds
    assert predicted == pytest.approx(2 * 8 * BYTES / (MBIT_PER_S * 1e6))
    check(measure(network, "gasloc", {"mbit_per_s": MBIT_PER_S}), predicted)
    network.slow_down(f"{MBIT_PER_S}mbit")
    check(measure(network, "gasloc"), predicted)


@pytest.mark.parametrize("network", [4], indirect=True)
def test_rounds_of_two_sites_take_as_long_as_predicted(network: Network) -> None:
    """Two workers at each site; all their messages share one line between the sites.

    TCP does not share it evenly, so the worker with the longest wait counts.
    """
    line = {"sites": 2, "between_sites": {"mbit_per_s": 1000}, "uplink_mbit_per_s": MBIT_PER_S}
    links = as_links({"default": {"mbit_per_s": 10_000}, **line})
    assert links is not None
    network.divide(2, f"{MBIT_PER_S}mbit")
    alone_s = RATE.seconds(BYTES)
    gossip = LinkTimes(links, 4).all_neighbors(BYTES, Ring(), 0).of_worker(0).seconds
    assert gossip == pytest.approx(2 * alone_s)
    check([max(measure(network, "gasloc"))], gossip)
    mean = LinkTimes(links, 4).mean(1.5 * BYTES, 6, 0).seconds
    assert mean == pytest.approx(1.5 * alone_s)
    check([max(measure(network, "diloco"))], mean)


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_fetch_of_pairwise_gossip_takes_as_long_as_predicted(
    network: Network, tmp_path: Path
) -> None:
    """With a key file; both workers fetch from each other at the same time."""
    write_certificate(tmp_path / "job.pem")
    predicted = LinkTimes(Links(RATE), 2).fetch(0, 1, BYTES, 0).seconds
    network.slow_down(f"{MBIT_PER_S}mbit")
    check(measure(network, "pairwise", keys=tmp_path / "job.pem"), predicted)
