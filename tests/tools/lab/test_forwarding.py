"""The switch's frames in time: rates, delays, losses, order; with a made-up clock."""

from dataclasses import replace

import pytest

from offbeat.lab.shaping import burst_bytes, queue_bytes
from offbeat.lab.switch.forwarding import Crossbar
from offbeat.lab.switch.link_state import LinkPlan, PairPlan
from offbeat.lab.switch.tap import HEADER_BYTES, wire_bytes

pytestmark = pytest.mark.timeout(30)

MBIT = 1_000_000
PLAN = LinkPlan("net", (None, None, None), (0.0,) * 3, (0.0,) * 3)


class World:
    """A crossbar, its clock, and who got which frame when."""

    def __init__(self, plan: LinkPlan) -> None:
        self.now_s = 0.0
        self.got: list[tuple[float, int, bytes]] = []
        self.crossbar = Crossbar(
            plan, lambda host, frame: self.got.append((self.now_s, host, frame))
        )

    def send(self, source: int, to: int, *frames: bytes, size: int = 1000) -> None:
        for frame in frames:
            self.crossbar.forward(self.now_s, source, to, frame, size)

    def run(self, until_s: float = float("inf")) -> None:
        while (at_s := self.crossbar.next_s()) is not None and at_s <= until_s:
            self.now_s = max(self.now_s, at_s)
            self.crossbar.advance(self.now_s)
        self.now_s = max(self.now_s, until_s) if until_s < float("inf") else self.now_s

    def times_s(self) -> list[float]:
        return [at_s for at_s, _, _ in self.got]

    def frames(self) -> list[bytes]:
        return [frame for _, _, frame in self.got]


def test_each_way_has_its_own_delay():
    world = World(PLAN)
    world.send(0, 2, b"a")
    assert world.got == [(0.0, 2, b"a")]
    assert world.crossbar.next_s() is None
    world = World(replace(PLAN, latencies_s=(0.0, 0.02, 0.005)))
    for source, to in ((0, 1), (0, 2), (1, 2), (2, 1)):
        world.send(source, to, bytes([source, to]))
    world.run()
    assert world.got == [
        (0.005, 2, b"\0\2"),
        (0.02, 1, b"\0\1"),
        (0.02, 2, b"\1\2"),
        (0.02, 1, b"\2\1"),
    ]


def test_a_pair_has_a_delay_of_its_own_in_both_directions():
    plan = replace(PLAN, latencies_s=(0.01,) * 3, pairs=(PairPlan((2, 0), latency_s=0.0),))
    world = World(plan)
    for source, to in ((0, 2), (2, 0), (0, 1)):
        world.send(source, to, b"x")
    world.run()
    assert [(at_s, host) for at_s, host, _ in world.got] == [(0.0, 2), (0.0, 0), (0.01, 1)]


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, rates_bps=(None, 8 * MBIT, None)),
        replace(PLAN, pairs=(PairPlan((0, 1), rate_bps=8 * MBIT),)),
    ],
)
def test_a_rate_holds_on_average_after_a_burst(plan):
    world, count = World(plan), 100
    world.send(0, 1, *[bytes([i]) for i in range(count)])
    world.run()
    assert world.frames() == [bytes([i]) for i in range(count)]
    burst = burst_bytes(8 * MBIT)
    at_once = sum(at_s == 0.0 for at_s in world.times_s())
    assert burst / 1000 <= at_once <= burst / 1000 + 1  # the last one overdraws
    assert world.times_s()[-1] == pytest.approx((count * 1000 - 1000 - burst) * 8 / (8 * MBIT))


def test_incast_shares_the_receivers_rate():
    world = World(replace(PLAN, rates_bps=(8 * MBIT, None, None)))
    for _ in range(30):
        world.send(1, 0, b"1")
        world.send(2, 0, b"2")
    world.run()
    assert world.times_s()[-1] == pytest.approx((59_000 - burst_bytes(8 * MBIT)) * 8 / (8 * MBIT))
    assert world.frames() == [b"1", b"2"] * 30


def test_a_frame_larger_than_the_burst_gets_through():
    world = World(replace(PLAN, rates_bps=(None, MBIT, None)))
    world.send(0, 1, b"a", b"b", b"c", size=50_000)
    world.run()
    free_s = [(n * 50_000 - burst_bytes(MBIT)) * 8 / MBIT for n in range(3)]
    assert world.times_s() == pytest.approx([0.0, free_s[1], free_s[2]])


def test_a_full_queue_drops():
    world = World(replace(PLAN, rates_bps=(None, MBIT, None)))
    world.send(0, 1, *[b"x"] * 1000)
    world.run()
    assert world.crossbar.dropped == 1000 - len(world.got) > 0
    most = queue_bytes(MBIT) + burst_bytes(MBIT)
    assert most - 2000 < 1000 * len(world.got) <= most + 1000


def test_loss_is_the_share_that_was_asked_and_that_of_the_pair():
    pairs = (PairPlan((0, 2), loss=0.0),)
    world = World(replace(PLAN, losses=(0.0, 0.1, 0.0), pairs=pairs))
    for to in (1, 2):
        world.send(0, to, *[b"x"] * 5000)
    lost = 5000 - sum(host == 1 for _, host, _ in world.got)
    assert lost == world.crossbar.dropped
    assert lost == pytest.approx(500, abs=100)  # more than four standard deviations


def test_after_a_change_no_frame_overtakes_another_of_its_pair():
    world = World(replace(PLAN, latencies_s=(0.05,) * 3))
    world.send(0, 1, b"a")
    world.run(0.01)
    world.crossbar.change(world.now_s, PLAN)
    world.send(0, 1, b"b")
    world.send(2, 1, b"c")
    world.run()
    assert world.got == [(0.01, 1, b"c"), (0.05, 1, b"a"), (0.05, 1, b"b")]


@pytest.mark.parametrize("rate_bps", [8 * MBIT, None])
def test_a_higher_rate_holds_for_what_waits_already(rate_bps):
    slow = replace(PLAN, rates_bps=(None, MBIT, None))
    world = World(slow)
    world.send(0, 1, *[bytes([i]) for i in range(100)])
    world.run(0.1)
    left = 100 - len(world.got)
    world.crossbar.change(world.now_s, replace(PLAN, rates_bps=(None, rate_bps, None)))
    world.run()
    assert world.frames() == [bytes([i]) for i in range(100)]
    rest_s = 0.0 if rate_bps is None else left * 8000 / rate_bps
    assert world.times_s()[-1] == pytest.approx(0.1 + rest_s, abs=0.002)


def frame_of(payload: int, segment: int) -> bytes:
    """An Ethernet frame with a TCP segment of so many bytes, to be cut if `segment` is not 0."""
    header = bytes([1, bool(segment)]) + (66).to_bytes(2, "little")
    header += segment.to_bytes(2, "little") + (34).to_bytes(2, "little") + bytes(2)
    tcp = bytes(12) + bytes([8 << 4]) + bytes(19)  # with timestamps: 32 bytes
    assert len(header) == HEADER_BYTES
    return header + bytes(34) + tcp + bytes(payload)


def test_what_is_cut_later_counts_with_all_its_headers():
    for payload in (1, 1448, 1449, 14_480, 20_000):
        packets = -(-payload // 1448)
        assert wire_bytes(frame_of(payload, 1448)) == payload + 66 * packets
        assert wire_bytes(frame_of(payload, 0)) == payload + 66
