"""What the facts and results of machines mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_loco.doctor.findings import FAILED, OK, WARNING, Finding
from lightning_loco.doctor.messages import Contact, Door, Facts, Results, Summary
from lightning_loco.doctor.place import Place
from lightning_loco.doctor.report import report
from lightning_loco.doctor.roads import measured
from lightning_loco.doctor.verdict import judge, judge_alone
from lightning_loco.doctor.visit import MasterError
from tests.doctor.fake_machine import facts_of

WORLD = 3


def door(rank: int, **others: Any) -> Door:
    fresh = Door("gloo", "eth0", f"10.0.0.{rank + 1}", 40000 + rank)
    return dataclasses.replace(fresh, **others)


def machine(rank: int, **others: Any) -> Facts:
    doors = others.pop("doors", (door(rank),))
    return facts_of(rank, WORLD, *doors, **others)


def contact(source: int, target: int, failure: str = "") -> Contact:
    known = (0.0, 0.0) if failure else (0.001, 1e6 * (1 + source + WORLD * target))
    return Contact(source, target, 0, failure, *known)


def summary(*changed: Facts, failures: dict[tuple[int, int], str] | None = None) -> Summary:
    """Three machines; some are not as they should be, some cannot reach others."""
    own = {facts.rank: facts for facts in changed}
    present = tuple(own.get(rank, machine(rank)) for rank in range(WORLD))
    failures = failures or {}
    results = tuple(
        Results(
            tuple(
                contact(source, target, failures.get((source, target), ""))
                for target in range(WORLD)
                if target != source
            ),
            (),
            0.0,
            0.0,
        )
        for source in range(WORLD)
    )
    return Summary(present, results, ())


def with_results(known: Summary, rank: int, **others: Any) -> Summary:
    results = list(known.results)
    results[rank] = dataclasses.replace(results[rank], **others)  # type: ignore[type-var]
    return dataclasses.replace(known, results=tuple(results))


def faults(known: Summary, world: int = WORLD) -> list[Finding]:
    found = judge(known, known.present[0], world)
    assert [one.check for one in found].count("master port") == 1
    return [one for one in found if one.status != OK]


def only_fault(known: Summary, check: str, status: str, world: int = WORLD) -> str:
    (one,) = faults(known, world)
    assert (one.check, one.status) == (check, status)
    return one.text


def test_all_well() -> None:
    found = judge(summary(), machine(1), WORLD)
    assert {one.status for one in found} == {OK}
    texts = {one.check: one.text for one in found}
    assert list(texts) == [
        "machines",
        "master port",
        "host names",
        "interfaces",
        "connections",
        "name server",
        "clocks",
        "versions",
        "open files",
    ]
    assert texts["machines"] == "3 of 3 have come"
    assert texts["host names"] == "node-1 is 10.0.0.2"
    assert texts["interfaces"] == "gloo at 10.0.0.2 (eth0)"
    assert texts["connections"] == "all 6 are open"
    assert texts["open files"] == "65,536"


def test_who_is_missing() -> None:
    assert only_fault(summary(), "machines", FAILED, world=4).startswith("machine 3 has not come")
    assert only_fault(summary(), "machines", FAILED, world=5).startswith("machines 3, 4 have not")


def test_who_has_gone() -> None:
    known = summary()
    known = dataclasses.replace(known, results=(known.results[0], None, known.results[2]))
    text = only_fault(known, "machines", FAILED)
    assert text.startswith("machine 1 (node-1) came, and has told no results")


def test_who_was_turned_away() -> None:
    known = dataclasses.replace(summary(), refused=("there are two machines 1: a and b",))
    assert only_fault(known, "machines", FAILED) == "there are two machines 1: a and b"


class TestHostNames:
    def test_the_trap_in_etc_hosts(self) -> None:
        bad = machine(2, name_address="127.0.1.1", doors=(door(2, address="127.0.1.1"),))
        failures = {(0, 2): "refused", (1, 2): "refused"}
        assert only_fault(summary(bad, failures=failures), "host names", FAILED) == (
            "machine 2 (node-2): its host name leads to 127.0.1.1, so that gloo listens at "
            "127.0.1.1, where no other machine reaches it: set GLOO_SOCKET_IFNAME=eth0 there, or "
            "write 10.0.0.3 into its /etc/hosts"
        )

    def test_machine_0_may_not_know_its_own_road(self) -> None:
        local = {"name_address": "", "road_address": "127.0.0.1", "road_interface": "lo"}
        bad = machine(0, doors=(door(0, address="127.0.0.1"),), **local)
        text = only_fault(summary(bad), "host names", FAILED)
        assert "leads to no address, so that gloo" in text
        assert "set GLOO_SOCKET_IFNAME=INTERFACE there, or write its own address into" in text

    def test_a_variable_that_names_loopback(self) -> None:
        bad = machine(2, doors=(door(2, address="127.0.0.1"),))
        assert only_fault(summary(bad), "interfaces", FAILED) == (
            "machine 2 (node-2): gloo listens at 127.0.0.1, where no other machine reaches it: set "
            "GLOO_SOCKET_IFNAME=eth0 there"
        )
        bad = machine(2, doors=(door(2), door(2, use="NCCL", address="127.0.0.1")))
        text = only_fault(summary(bad), "interfaces", FAILED)
        assert "NCCL listens at 127.0.0.1" in text
        assert text.endswith("set NCCL_SOCKET_IFNAME=eth0 there")

    def test_loopback_will_do_on_one_machine(self) -> None:
        ranks = range(WORLD)
        local = [machine(r, host="a", doors=(door(r, address="127.0.0.1"),)) for r in ranks]
        assert faults(summary(*local)) == []

    def test_slow_or_unknown(self) -> None:
        text = only_fault(summary(machine(1, name_s=1.5)), "host names", WARNING)
        assert "it took 1.5 s to look up its own host name" in text
        text = only_fault(summary(machine(1, name_address="")), "host names", WARNING)
        assert "leads to no address" in text


def test_interfaces_that_are_not_there() -> None:
    text = only_fault(summary(machine(1, faults=("GLOO_SOCKET_IFNAME=x",))), "interfaces", FAILED)
    assert text == "machine 1 (node-1): GLOO_SOCKET_IFNAME=x"


class TestConnections:
    def test_the_failing_pair_port_and_mend(self) -> None:
        text = only_fault(summary(failures={(2, 0): "silent"}), "connections", FAILED)
        assert text == (
            "machine 2 (node-2) cannot reach machine 0 (node-0) at 10.0.0.1:40000 (gloo): no "
            "answer, as when a firewall drops packets. Open the TCP ports 32768-60999 of machine 0 "
            "to the others, since any free one is taken, or set GLOO_SOCKET_IFNAME on machine 0 to "
            "an interface that the others reach"
        )

    def test_one_line_for_all_who_cannot_reach_a_machine(self) -> None:
        text = only_fault(
            summary(failures={(2, 0): "refused", (1, 0): "refused"}), "connections", FAILED
        )
        assert text.startswith("machine 1 (node-1), machine 2 (node-2) cannot reach machine 0")

    def test_the_interface_by_which_it_does_reach_others(self) -> None:
        other = machine(2, road_interface="eth1", road_address="10.1.0.3")
        for failure in ("silent", "refused", "unreachable", "stranger", "broken"):
            known = summary(other, failures={(1, 2): failure})
            text = only_fault(known, "connections", FAILED)
            assert "et GLOO_SOCKET_IFNAME=eth1 on machine 2, by which it reaches" in text
        for_nccl = dataclasses.replace(other, doors=(door(2, use="NCCL", address="fd00::1"),))
        known = summary(for_nccl, failures={(1, 2): "silent"})
        text = only_fault(known, "connections", FAILED)
        assert "at [fd00::1]:40002 (NCCL)" in text
        assert "set NCCL_SOCKET_IFNAME=eth1" in text

    def test_unknown_ports(self) -> None:
        known = summary(machine(0, ports="any"), failures={(1, 0): "silent"})
        assert "Open all TCP ports of machine 0" in only_fault(known, "connections", FAILED)

    def test_the_narrowest_roads(self) -> None:
        head, *lines = measured(summary(failures={(0, 1): "silent"}), 4)
        assert head.endswith(", the 4 slowest of 5")
        assert [line.split()[:3] for line in lines] == [
            ["1", "->", "0"],
            ["2", "->", "0"],
            ["2", "->", "1"],
            ["0", "->", "2"],
        ]
        assert lines[0].split()[3:] == ["1.00", "ms", "2.00", "MB/s"]

    def test_roads_that_were_not_measured_are_counted(self) -> None:
        unknown = dataclasses.replace(contact(0, 1), bytes_per_s=0.0)
        head, *lines = measured(with_results(summary(), 0, contacts=(unknown,)), 12)
        assert head.endswith("; 1 not measured in time")
        assert len(lines) == 4


def test_the_name_server() -> None:
    known = with_results(summary(), 0, slow_lookups=("::ffff:10.0.0.2",))
    text = only_fault(known, "name server", WARNING)
    assert "no name for ::ffff:10.0.0.2 within half a second" in text


class TestClocks:
    @pytest.mark.parametrize(("offset_s", "side"), [(3.25, "ahead of"), (-3.25, "behind")])
    def test_a_wrong_clock(self, offset_s: float, side: str) -> None:
        known = with_results(summary(), 1, clock_offset_s=offset_s, clock_error_s=0.01)
        text = only_fault(known, "clocks", WARNING)
        assert text.startswith(f"the clock of machine 1 (node-1) is 3.2 s {side} machine 0's")

    def test_what_may_be_the_network(self) -> None:
        known = with_results(summary(), 1, clock_offset_s=1.5, clock_error_s=0.6)
        assert faults(known) == []


class TestVersions:
    def test_who_has_which(self) -> None:
        known = summary(machine(1, versions={"torch": "2.5.1"}))
        assert only_fault(known, "versions", FAILED) == (
            "torch differs: 2.13.0 on machines 0, 2; 2.5.1 on machine 1. Install the same on all"
        )

    def test_a_package_that_is_nowhere(self) -> None:
        nowhere = [machine(rank, versions={"torch": "not installed"}) for rank in range(WORLD)]
        text = only_fault(summary(*nowhere), "versions", FAILED)
        assert text == "torch is not installed on any machine"


def test_open_files() -> None:
    text = only_fault(summary(machine(1, open_files=256)), "open files", WARNING)
    assert "only 256 files open" in text


def test_a_machine_alone(subtests: pytest.Subtests) -> None:
    place = Place(1, WORLD, "node-a", 29500, "", "", 10.0)
    checks = {"host names", "interfaces", "versions", "open files"}
    for kind, text in [
        ("name", "machine 1 (node-1) does not find node-a: give --master the address"),
        ("refused", "cannot reach machine 0 at 10.0.0.1:29500: the connection is refused"),
        ("silent", "10.0.0.1:29500: no answer, as when a firewall drops packets. Open TCP port"),
        ("unreachable", "10.0.0.1:29500: no route. Give --master an address"),
        ("stranger", "what listens there is no doctor, perhaps a run"),
        ("turned_away", "machine 0 has turned this one away: no route"),
        ("lost", "machine 0 at 10.0.0.1:29500 was there, and has gone"),
        ("taken", "port 29500 of machine 0 (node-1) is taken"),
    ]:
        with subtests.test(kind):
            error = MasterError(kind, "10.0.0.1", "no route")
            first, *others = judge_alone(place, machine(1), error)
            assert (first.check, first.status) == ("master port", FAILED)
            assert text in first.text
            assert {one.status for one in others} == {OK}
            assert {one.check for one in others} == checks


class TestSoundness:
    def test_of_what_should_come(self) -> None:
        assert summary().is_sound()

    def test_of_what_should_not(self, subtests: pytest.Subtests) -> None:
        assert not dataclasses.replace(summary(), results=()).is_sound()
        for wrong in (
            contact(1, 2),  # of another machine
            contact(0, 7),  # a machine that is not there
            dataclasses.replace(contact(0, 1), door=1),
            dataclasses.replace(contact(0, 1), door=-1),
            contact(0, 1, "tired"),
        ):
            with subtests.test(wrong=wrong):
                assert not with_results(summary(), 0, contacts=(wrong,)).is_sound()


def test_the_report_fits_the_terminal() -> None:
    place = Place(0, WORLD, "node-a", 29500, "", "", 10.0)
    known = summary(failures={(2, 0): "silent"})
    found, roads = judge(known, machine(0), WORLD), measured(known, 12)
    whole = report(place, machine(0), found, roads)
    head, _, first = whole.splitlines()[:3]
    assert head == "lightning-loco doctor: machine 0 of 3 (node-0), meeting at node-a:29500"
    assert first == "machines      ok       3 of 3 have come"
    assert whole.endswith("\n\n1 failed")
    narrow = report(place, machine(0), found, roads, width=72)
    assert max(map(len, narrow.splitlines()[1:])) <= 72
    assert narrow.split() == whole.split()


def test_the_conclusion() -> None:
    place = Place(0, WORLD, "node-a", 29500, "", "", 10.0)
    known = summary(machine(1, open_files=10))
    text = report(place, machine(0), judge(known, machine(0), WORLD), [])
    assert text.endswith("\n\nall well, 1 warning")
