"""Findings from the facts and connections of machines, and the printed report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_loco.tools.doctor.connectivity import ConnectionResult, Results
from lightning_loco.tools.doctor.facts import Facts
from lightning_loco.tools.doctor.findings import (
    FAILED,
    MAX_MATRIX_SIZE,
    OK,
    WARNING,
    Finding,
    judge,
    judge_facts,
    matrix,
    report,
    write_json,
)
from tests.tools.doctor.fake_machine import facts_of

WORLD = 3


def machines(*changed: Facts) -> list[Facts]:
    """Return facts of three machines, some of them changed."""
    own = {facts.rank: facts for facts in changed}
    return [own.get(rank, facts_of(rank, WORLD)) for rank in range(WORLD)]


def results(
    failures: dict[tuple[int, int], str] | None = None, world: int = WORLD
) -> list[Results]:
    """Return the results of all machines; some of them cannot reach others."""
    failed = failures or {}
    return [
        Results(
            source,
            tuple(
                ConnectionResult(
                    target, failed.get((source, target), ""), (1 + source + 3 * target) / 1000
                )
                for target in range(world)
                if target != source
            ),
            (),
            0.0,
        )
        for source in range(world)
    ]


def problems(
    *changed: Facts,
    failures: dict[tuple[int, int], str] | None = None,
    world: int = WORLD,
    received: Sequence[Results] | None = None,
    refused: Sequence[str] = (),
) -> list[Finding]:
    received = results(failures) if received is None else received
    return [one for one in judge(world, machines(*changed), received, refused) if one.status != OK]


def only(found: list[Finding], check: str, status: str) -> str:
    (one,) = found
    assert (one.check, one.status) == (check, status)
    return one.text


def test_all_well() -> None:
    found = judge(WORLD, machines(), results(), ())
    assert found == [
        Finding("machines", OK, "3 of 3 have joined"),
        Finding(
            "connections",
            OK,
            "all 6 are open; the longest round trip is 8.00 ms, from machine 1 to machine 2",
        ),
    ]


def test_missing_machines() -> None:
    text = only(problems(world=4), "machines", FAILED)
    assert text.startswith("machine 3 has not joined: start lightning-loco doctor there")
    assert only(problems(world=5), "machines", FAILED).startswith("machines 3, 4 have not joined")


def test_machine_without_results() -> None:
    received = [results()[rank] for rank in (0, 2)]
    text = only(problems(received=received), "machines", FAILED)
    assert text.startswith("machine 1 (node-1) joined, but sent no results")


def test_refused_machines() -> None:
    assert only(problems(refused=["there are two"]), "machines", FAILED) == "there are two"


class TestConnections:
    def fault_of(self, *changed: Facts, failures: dict[tuple[int, int], str]) -> str:
        return only(problems(*changed, failures=failures), "connections", FAILED)

    def test_text_names_the_machines_the_port_and_the_remedy(self) -> None:
        assert self.fault_of(failures={(2, 0): "silent"}) == (
            "machine 2 (node-2) cannot reach machine 0 (node-0) at 10.0.0.1:40000: no answer, as "
            "when a firewall drops packets. Open the TCP ports 32768-60999 of machine 0 to the "
            "others, since gloo uses any free one, or set GLOO_SOCKET_IFNAME on machine 0 to an "
            "interface that all can reach"
        )

    def test_one_finding_for_all_that_cannot_reach_a_machine(self) -> None:
        text = self.fault_of(failures={(2, 0): "refused", (1, 0): "refused"})
        assert text.startswith("machine 1 (node-1), machine 2 (node-2) cannot reach machine 0")

    def test_many_that_cannot_reach_a_machine(self) -> None:
        present = [facts_of(rank, 20) for rank in range(20)]
        received = results({(rank, 0): "refused" for rank in range(1, 20)}, world=20)
        (one,) = [one for one in judge(20, present, received, ()) if one.status == FAILED]
        assert "machine 8 (node-8) and 11 others cannot reach machine 0 (node-0)" in one.text

    def test_text_names_the_interface_that_reaches_others(self, subtests: pytest.Subtests) -> None:
        other = facts_of(2, WORLD, route_interface="eth1", route_address="10.1.0.3")
        for failure in ("silent", "refused", "unreachable", "wrong host", "stalled"):
            with subtests.test(failure):
                text = self.fault_of(other, failures={(1, 2): failure})
                assert "et GLOO_SOCKET_IFNAME=eth1 on machine 2, by which it reaches" in text

    def test_lost_large_packets(self) -> None:
        text = self.fault_of(failures={(1, 2): "stalled"})
        assert "breaks or stalls, as when large packets are lost. Lower the MTU of eth0 on" in text

    def test_unknown_ports_and_ipv6(self) -> None:
        there = facts_of(0, WORLD, ports="any", address="fd00::1")
        text = self.fault_of(there, failures={(1, 0): "silent"})
        assert "at [fd00::1]:40000: " in text
        assert "Open all TCP ports of machine 0" in text

    def test_host_name_that_resolves_to_loopback(self) -> None:
        local = {"name_address": "127.0.1.1", "address": "127.0.1.1", "interface": "lo"}
        text = self.fault_of(facts_of(2, WORLD, **local), failures={(0, 2): "refused"})
        assert text == (
            "machine 0 (node-0) cannot reach machine 2 (node-2) at 127.0.1.1:40002: only that "
            "machine itself can reach this address, to which its host name resolves. Set "
            "GLOO_SOCKET_IFNAME=eth0 on machine 2, by which it reaches machine 0, or write "
            "10.0.0.3 into its /etc/hosts"
        )

    def test_machine_0_may_not_know_its_own_address(self) -> None:
        local = {"name_address": "", "address": "127.0.0.1", "interface": "lo"}
        route = {"route_address": "127.0.0.1", "route_interface": "lo"}
        text = self.fault_of(facts_of(0, WORLD, **local, **route), failures={(1, 0): "refused"})
        assert "Set GLOO_SOCKET_IFNAME on machine 0 to an interface that all can reach, or" in text
        assert text.endswith("write its address into its /etc/hosts")

    def test_variable_that_names_loopback(self) -> None:
        there = facts_of(2, WORLD, address="127.0.0.1", interface="lo")
        text = self.fault_of(there, failures={(0, 2): "refused"})
        assert "only that machine itself can reach this address. Set GLOO" in text
        assert "/etc/hosts" not in text

    def test_loopback_is_fine_on_one_machine(self) -> None:
        assert (
            problems(*(facts_of(rank, WORLD, address="127.0.0.1") for rank in range(WORLD))) == []
        )


def test_variables_that_match_no_interface() -> None:
    wrong = facts_of(1, WORLD, faults=("GLOO_SOCKET_IFNAME=x",))
    text = only(problems(wrong), "interfaces", FAILED)
    assert text == "machine 1 (node-1): GLOO_SOCKET_IFNAME=x"


def test_slow_name_server() -> None:
    received = [*results()[:2], Results(2, results()[2].connections, ("::ffff:10.0.0.1",), 0.0)]
    text = only(problems(received=received), "name server", WARNING)
    assert text.startswith("machine 2 (node-2): no name for ::ffff:10.0.0.1 within half a second")


class TestVersions:
    def test_versions_that_differ(self) -> None:
        other = facts_of(1, WORLD, versions={"torch": "2.5.1"})
        assert only(problems(other), "versions", FAILED) == (
            "torch differs: 2.13.0 on machines 0, 2; 2.5.1 on machine 1. Install the same on all"
        )

    def test_package_that_is_not_installed(self) -> None:
        nowhere = facts_of(0, 1, versions={"torch": "not installed"})
        text = only(judge_facts([nowhere]), "versions", FAILED)
        assert text == "torch is not installed on any machine"


def test_few_open_files_and_a_full_disk() -> None:
    text = only(problems(facts_of(1, WORLD, open_files=256)), "open files", WARNING)
    assert "machine 1 (node-1): a process may have only 256 files open" in text
    text = only(problems(facts_of(1, WORLD, free_bytes=2**29)), "disk", WARNING)
    assert text.startswith("machine 1 (node-1): 0.5 GiB free in the current folder: ")


class TestResults:
    def test_valid(self) -> None:
        assert results()[0].are_valid(0, range(WORLD))
        assert results({(0, 1): "silent"})[0].are_valid(0, range(WORLD))

    def test_invalid(self, subtests: pytest.Subtests) -> None:
        right, other = ConnectionResult(1, "", 0.1), ConnectionResult(2, "", 0.1)
        for wrong in (
            Results(1, (right, other), (), 0.0),  # from another machine
            Results(0, (right,), (), 0.0),
            Results(0, (right, right), (), 0.0),
            Results(0, (right, other, ConnectionResult(7, "", 0.1)), (), 0.0),
            Results(0, (right, ConnectionResult(2, "tired", 0.1)), (), 0.0),
        ):
            with subtests.test(wrong=wrong):
                assert not wrong.are_valid(0, range(WORLD))


class TestMatrix:
    def test_round_trips_and_failures(self) -> None:
        received = results({(2, 0): "silent"})
        assert [line.split() for line in matrix(machines(), [received[0], received[2]])] == [
            ["round", "trip,", "ms", "to", "0", "to", "1", "to", "2"],
            ["from", "0", "-", "4.00", "7.00"],
            ["from", "1", "?", "-", "?"],
            ["from", "2", "silent", "6.00", "-"],
        ]

    def test_no_matrix_for_one_machine_or_too_many(self) -> None:
        assert matrix([facts_of(0, 1)], results(world=1)) == []
        world = MAX_MATRIX_SIZE + 1
        assert matrix([facts_of(rank, world) for rank in range(world)], results(world=world)) == []


def test_report() -> None:
    own = facts_of(0, WORLD, environment="OMP_NUM_THREADS=1")
    found = judge(WORLD, machines(own), results({(2, 0): "silent"}), ())
    lines = report("machine 0 of 3", own, found, ["the", "matrix"]).splitlines()
    assert lines[:3] == [
        "lightning-loco doctor: machine 0 of 3",
        "",
        "machines      ok       3 of 3 have joined",
    ]
    assert lines[3].startswith("connections   failed   machine 2 (node-2) cannot reach machine 0")
    assert lines[4:] == [
        "interfaces    ok       gloo at 10.0.0.1 (eth0); node-0 is 10.0.0.1",
        "versions      ok       torch 2.13.0",
        "open files    ok       65,536",
        "hardware      ok       cores: 8, NVIDIA GPUs: 1",
        "environment   ok       OMP_NUM_THREADS=1",
        "disk          ok       1024.0 GiB free in the current folder",
        "",
        "the",
        "matrix",
        "",
        "1 failed",
    ]


def test_report_with_a_warning() -> None:
    own = facts_of(0, 1, open_files=10)
    text = report("alone", own, judge_facts([own]), [])
    assert text.endswith("\n\nall well, 1 warning")
    assert "\nconnections " not in text


class TestJson:
    def links(self, tmp_path: Path, received: Sequence[Results]) -> Any:
        path = tmp_path / "machines.json"
        write_json(str(path), machines(), received, [Finding("disk", OK, "much")])
        content = json.loads(path.read_text())
        assert content["machines"][1] == {"rank": 1, "name": "node-1"}
        assert content["findings"] == [{"check": "disk", "status": "ok", "text": "much"}]
        return content["links"]

    def test_a_machine_has_the_better_one_of_two_connections(self, tmp_path: Path) -> None:
        """The slow link of machine 1 limits what 0 sends to 1, and what 1 sends to 2."""
        rates = (10.0, 11.0, 100.0)
        received = [
            replace(one, mbit_per_s=rate) for one, rate in zip(results(), rates, strict=True)
        ]
        links = self.links(tmp_path, received)
        assert links["workers"]["0"] == {"mbit_per_s": 100.0, "latency_s": 0.0035}
        assert links["workers"]["1"] == {"mbit_per_s": 11.0, "latency_s": 0.004}
        assert links["workers"]["2"]["mbit_per_s"] == 100.0
        assert links["default"] == links["workers"]["1"]

    def test_no_links_unless_all_are_measured(self, tmp_path: Path) -> None:
        assert self.links(tmp_path, results()) is None
        measured = [replace(one, mbit_per_s=5.0) for one in results()]
        assert self.links(tmp_path, measured[:2]) is None
        failed = [replace(one, mbit_per_s=5.0) for one in results({(0, 1): "silent"})]
        assert self.links(tmp_path, failed) is None
