"""The cluster description: units, relations, files."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.core.units import format_rate, format_time, parse_rate_bps, parse_time_s
from offbeat.lab import Change, Cluster, HostOverride, Link, Pair

pytestmark = pytest.mark.timeout(30)

FULL = Cluster(
    hosts=4,
    processes_per_host=2,
    threads=2,
    congestion_control="reno",
    links=(Link(name="wan", rate="100mbit", latency="20ms", loss="1%"), Link(name="lan")),
    overrides=(
        HostOverride(host=2, rates={"wan": "20mbit", "lan": 5e6}, threads=1, speed=0.5),
        HostOverride(host=3, rates={"lan": "unlimited"}, latencies={"wan": 0.05}, jitter=0.1),
    ),
    pairs=(
        Pair(hosts=(0, 3), rates={"wan": "5mbit"}, latencies={"wan": "80ms"}),
        Pair(hosts=(2, 1), losses={"wan": "5%", "lan": 0.5}),
    ),
    changes=(
        Change(at="30 s", rate="20mbit"),
        Change(at="1.5min", latency=0, loss=0, link="wan", hosts=(1, 2)),
        Change(at=0, rate="unlimited", pair=(0, 3)),
    ),
)


RATES = [
    ("100mbit", 100_000_000),
    ("1.5gbit", 1_500_000_000),
    (" 800 Kbit/s ", 800_000),
    ("2500bit", 2500),
    (64_000, 64_000),
    ("1Gbps", 10**9),
    ("1 Gbit/s", 10**9),
    ("1G", 10**9),
    ("100 Mb/s", 100_000_000),
    ("100Mbits", 100_000_000),
    ("12mbps", 12_000_000),
    ("64k", 64_000),
    (1e6, 1_000_000),
    (None, None),
    ("unlimited", None),
]


def test_rates_are_read_in_bits_per_second() -> None:
    for text, rate_bps in RATES:
        assert parse_rate_bps(text) == rate_bps


def test_rates_and_times_survive_being_written():
    for rate_bps in (1000, 1001, 64_000, 999_999, 12_500_000, 10**9, None):
        assert parse_rate_bps(format_rate(rate_bps)) == rate_bps
    for time_s in (0.0, 1e-6, 0.00025, 0.02, 1.5):
        assert parse_time_s(format_time(time_s)) == pytest.approx(time_s)


# field of a link, and values that it refuses by its name
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("rate", ["12mib", "100MB/s", "12 MBps", "12mbytes", "fast", 0, -5, "100gbit", True]),
        ("rate", ["200", "1e6", "200mb", "200MB", "1 gb/s", "1.2.3MB"]),
        ("rate", [float("nan"), float("inf")]),
        ("latency", [20, "20min", "20ms/s", -1, "11s"]),
        ("loss", [1, -0.1, "2ms", "200%"]),
    ],
)
def test_wrong_values_of_a_link(field, values):
    for value in values:
        with pytest.raises(ValidationError, match=rf"{field} \("):
            Link(**{field: value})


def test_zero_latency_is_none():
    assert Link(latency=0).latency is None
    assert Link(latency="20ms").latency_s == 0.02


def test_between_two_hosts_the_worse_counts_and_the_pair_has_the_last_word():
    def way(one: int, other: int, link: str = "wan") -> tuple[object, ...]:
        found = FULL.way(one, other, link)
        assert found == FULL.way(other, one, link)
        return found.rate_bps, found.latency_s, found.loss

    assert way(0, 1) == (100_000_000, 0.02, 0.01)
    assert way(1, 2) == (20_000_000, 0.02, 0.05)
    assert way(2, 3) == (20_000_000, 0.05, 0.01)
    assert way(0, 3) == (5_000_000, 0.08, 0.01)
    assert way(0, 3, "lan") == (None, 0.0, 0.0)


def test_properties_of_hosts_and_ranks():
    hosts = range(4)
    assert [FULL.speed_of(host) for host in hosts] == [1, 1, 0.5, 1]
    assert [FULL.jitter_of(host) for host in hosts] == [0, 0, 0, 0.1]
    assert [FULL.threads_of(host) for host in hosts] == [2, 2, 1, 2]
    assert [FULL.rate_bps(host, "wan") for host in hosts] == [10**8, 10**8, 2 * 10**7, 10**8]
    assert FULL.rate_bps(3, "lan") is None
    assert [change.at_s for change in FULL.changes] == [30, 90, 0]
    assert FULL.world_size == 8
    assert [FULL.host_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"link \('dsl'\)"):
        FULL.rate_bps(0, "dsl")
    with pytest.raises(ValidationError, match="frozen"):
        FULL.hosts = 5  # type: ignore[misc]


# a description that contradicts itself, and the parameter that its refusal names
WRONG = [
    ({"hosts": 0}, "hosts"),
    ({"links": ()}, r"links \(0\)"),
    ({"links": (Link(), Link())}, "links: 'net'"),
    ({"overrides": (HostOverride(host=4),)}, r"host \(4\)"),
    ({"overrides": (HostOverride(host=1, rates={"wan": 1e6}),)}, r"link \('wan'\)"),
    ({"overrides": (HostOverride(host=1), HostOverride(host=1))}, "overrides: 1"),
    ({"overrides": ({"host": 0, "uplinks": {"wan": "5mbit"}},)}, r"uplinks: link \('wan'\)"),
    ({"congestion_control": "cu bic"}, "congestion_control"),
    ({"pairs": (Pair(hosts=(0, 4)),)}, r"pairs: host \(4\)"),
    ({"pairs": (Pair(hosts=(0, 1)), Pair(hosts=(1, 0)))}, r"pairs: \(0, 1\)"),
    ({"pairs": (Pair(hosts=(0, 1), losses={"wan": 0}),)}, r"pairs: losses: link \('wan'\)"),
    ({"changes": (Change(at=1, loss=0, hosts=(-1,)),)}, r"changes: at 1s: host \(-1\)"),
    ({"changes": (Change(at=1, loss=0, link="a"),)}, r"changes: at 1s: link \('a'\)"),
]


def test_a_wrong_relation_names_its_parameters():
    for settings, name in WRONG:
        with pytest.raises(ValidationError, match=name):
            Cluster(**{"hosts": 4, **settings})


@pytest.mark.parametrize("cluster", [FULL, Cluster(hosts=1), Cluster.simple(2, "1mbit")])
def test_toml_and_json_round_trip(cluster: Cluster, tmp_path: Path):
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster
    assert Cluster(**cluster.record()) == cluster
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


# a file, and the path of the key that its refusal names
WRONG_FILES = [
    ("hosts = 4\nrat = 5", "rat: "),
    ("hosts = 4\n[[links]]\nspeed = 5", "links.0.speed: "),
    ('hosts = 4\nrate = "1mbit"\n[[links]]', "rate and links"),
    ("rate = 5e6", "hosts: "),
    ('hosts = "four"', "hosts: ('four')"),
    ('hosts = 4\n[[links]]\nrate = "9bots"', "links.0.rate: rate ('9bots')"),
    ("hosts = 4\nloss = 0.1\n[[links]]", "loss and links"),
    ("hosts = 4\nloss = 1", "links.0.loss: loss (1)"),
    ("hosts = 4\n[[overrides]]\nhost = 1\nspeed = 0", "speed (0)"),
    ("hosts = 4\n[[overrides]]\nhost = 1\nspeed = '1'", "speed ('1')"),
    ("hosts = 4\n[[overrides]]\nhost = 1\njitter = -1", "jitter (-1)"),
    ("hosts = 4\n[[overrides]]\nhost = 1\nlatencies = 5", "latencies (5)"),
    ("hosts = 4\n[[pairs]]\nhosts = [1, 1]", "hosts ([1, 1])"),
    ("hosts = 4\n[[pairs]]\nrate = 1", "pairs.0.rate: "),
    ("hosts = 4\n[[changes]]\nat = 1", "the change at 1s"),
    ("hosts = 4\n[[changes]]\nat = '1h'\nrate = 5e6", "at ('1h')"),
    ("hosts = 4\n[[changes]]\nloss = 0", "changes.0.at: "),
    (
        "hosts = 4\n[[changes]]\nat = 1\nloss = 0\nhosts = [1]\npair = [0, 1]",
        "hosts ([1]) and pair",
    ),
    ("hosts = 4\n[[changes]]\nat = 1\nloss = 0\nhosts = []", "hosts ([])"),
    ("hosts = ", "TOML"),
]


def test_a_wrong_file_names_the_file_and_its_key(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    for text, key in WRONG_FILES:
        path.write_text(text)
        with pytest.raises(ValueError) as error:
            Cluster.load(path)
        assert str(error.value).startswith(f"{path}: ")
        assert key in str(error.value), text


UPLINKS = """
hosts = 3
rate = "100mbit"
uplink = "20mbit"
[[overrides]]
host = 1
uplinks = { net = "5mbit" }
[[overrides]]
host = 2
rates = { net = "50mbit" }
"""


def test_hosts_may_send_at_another_rate_than_they_receive():
    cluster = Cluster.from_toml(UPLINKS)
    hosts = range(3)
    assert [cluster.rate_bps(host, "net") for host in hosts] == [100e6, 100e6, 50e6]
    # A host's own rate is for both directions, unless it has an own uplink, too.
    assert [cluster.uplink_bps(host, "net") for host in hosts] == [20e6, 5e6, 50e6]
    ways = {(a, b): cluster.way(a, b, "net").rate_bps for a in hosts for b in hosts if a != b}
    assert ways == {
        (0, 1): 20e6, (0, 2): 20e6, (1, 0): 5e6, (1, 2): 5e6, (2, 0): 50e6, (2, 1): 50e6
    }  # fmt: skip
    assert [cluster.attachment(host, "net").rate_bps for host in hosts] == [20e6, 5e6, 50e6]
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert Cluster(**cluster.record()) == cluster
