"""Parts of a cluster description: links, differing hosts and pairs, changes over time."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from offbeat.core.units import (
    UNLIMITED,
    format_rate,
    format_time,
    parse_loss,
    parse_moment_s,
    parse_number,
    parse_rate_bps,
    parse_time_s,
)

_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$"


def rate_text(value: Any) -> str:
    """Return a rate as the text of cluster files."""
    return format_rate(parse_rate_bps(value))


def _latency(value: Any) -> str:
    return format_time(parse_time_s(value))


def _nonzero_latency(value: Any) -> str | None:
    latency_s = 0.0 if value is None else parse_time_s(value)
    return format_time(latency_s) if latency_s else None


def _moment(value: Any) -> str:
    return format_time(parse_moment_s(value))


def _speed(value: Any) -> float:
    return parse_number(value, "speed", 0.01, 100, "1 is this machine's pace, 0.5 half as fast")


def _jitter(value: Any) -> float:
    return parse_number(value, "jitter", 0, 2, "0.1 makes compute vary by about 10 %")


def optional(convert: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that leaves None as it is."""
    return BeforeValidator(lambda value: None if value is None else convert(value))


def _two_hosts(what: str) -> Callable[[Any], Any]:
    """Return a check for a pair of different hosts."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2 or value[0] == value[1]:
            raise ValueError(f"{what} ({value!r}) must be two different hosts, as in [0, 3]")
        return value

    return check


def _link_map(what: str, example: str, one: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator of tables that map link names to values."""

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{what} ({value!r}) must map link names to values: {example}")
        return {name: one(item) for name, item in value.items()}

    return BeforeValidator(check)


Rates = Annotated[
    Mapping[str, str | float | None], _link_map("rates", '{net = "20mbit"}', rate_text)
]
Latencies = Annotated[Mapping[str, str | float], _link_map("latencies", '{net = "20ms"}', _latency)]
Losses = Annotated[Mapping[str, str | float], _link_map("losses", "{net = 0.01}", parse_loss)]


class Part(BaseModel):
    """Frozen table of a cluster file. Unknown keys raise a ValidationError."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class Link(Part):
    """Network that connects all hosts, with a rate per host and direction.

    Attributes:
        name: name of the link.
        rate: text such as "100mbit", a number of bit/s, or None for an unshaped link.
        uplink: rate at which a host sends, if it differs from `rate`, at which it then receives.
        latency: one-way delay between two hosts, such as "20ms", or a number of seconds.
        loss: share of packets that are lost between two hosts, such as 0.01 or "1%".

    Raises:
        ValidationError: a value or the name is invalid (a ValueError).
    """

    name: str = Field(default="net", pattern=_NAME)
    rate: Annotated[str | float | None, BeforeValidator(rate_text)] = UNLIMITED
    uplink: Annotated[str | float | None, optional(rate_text)] = None
    latency: Annotated[str | float | None, BeforeValidator(_nonzero_latency)] = None
    loss: Annotated[str | float, BeforeValidator(parse_loss)] = 0.0

    @property
    def rate_bps(self) -> int | None:
        """Bits per second; None if unshaped."""
        return parse_rate_bps(self.rate)

    @property
    def latency_s(self) -> float:
        """One-way delay in seconds."""
        return 0.0 if self.latency is None else parse_time_s(self.latency)


class HostOverride(Part):
    """Settings of one host that differ from the other hosts.

    Between two hosts the smaller rate, the larger delay and the larger loss apply.

    Attributes:
        host: number of the host, from 0.
        rates: rates of this host by link name, in both directions, in place of the link's rate and
            uplink.
        uplinks: rates at which this host sends by link name, if they differ from those at which it
            receives.
        latencies: one-way delays by link name, in place of the link's delay.
        losses: shares of lost packets by link name, in place of the link's loss.
        threads: OMP_NUM_THREADS of the host's ranks, in place of the cluster's value.
        ranks: number of ranks on this host, in place of the cluster's `ranks`.
        speed: relative speed of compute (0.5: half as fast); used if ranks are paced.
        jitter: sigma of a lognormal factor on compute, drawn per iteration; used if ranks are
            paced.
    """

    host: int = Field(ge=0)
    rates: Rates = Field(default_factory=dict)
    uplinks: Rates = Field(default_factory=dict)
    latencies: Latencies = Field(default_factory=dict)
    losses: Losses = Field(default_factory=dict)
    threads: int | None = Field(default=None, ge=1)
    ranks: int | None = Field(default=None, ge=1)
    speed: Annotated[float, BeforeValidator(_speed)] = 1.0
    jitter: Annotated[float, BeforeValidator(_jitter)] = 0.0


class Pair(Part):
    """Settings between two hosts that differ, in both directions.

    Attributes:
        hosts: numbers of the two hosts.
        rates: additional rate limits between the hosts, by link name.
        latencies: one-way delays by link name, in place of those of the hosts.
        losses: shares of lost packets by link name, in place of those of the hosts.
    """

    hosts: Annotated[tuple[int, int], BeforeValidator(_two_hosts("hosts"))]
    rates: Rates = Field(default_factory=dict)
    latencies: Latencies = Field(default_factory=dict)
    losses: Losses = Field(default_factory=dict)


class Change(Part):
    """New values of a link at a time after the start of a run's ranks.

    Values that are None do not change.

    Attributes:
        at: time after the start of the ranks, such as "30s".
        rate: new rate.
        latency: new one-way delay.
        loss: new share of lost packets.
        link: name of the link; None: every link.
        hosts: hosts whose values change; None: all hosts.
        pair: the two hosts between which values change; excludes `hosts`.
    """

    at: Annotated[str | float, BeforeValidator(_moment)]
    rate: Annotated[str | float | None, optional(rate_text)] = None
    latency: Annotated[str | float | None, optional(_latency)] = None
    loss: Annotated[str | float | None, optional(parse_loss)] = None
    link: str | None = None
    hosts: tuple[int, ...] | None = None
    pair: Annotated[tuple[int, int] | None, optional(_two_hosts("pair"))] = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.rate is self.latency is self.loss is None:
            raise ValueError(f"the change at {self.at} changes nothing; give rate, latency or loss")
        if self.hosts is not None and self.pair is not None:
            raise ValueError(
                f"hosts ({list(self.hosts)}) and pair ({list(self.pair)}) exclude each other; "
                "write two changes"
            )
        if self.hosts == ():
            raise ValueError("hosts ([]) must not be empty; leave it out to change all of them")
        return self

    @property
    def at_s(self) -> float:
        """Seconds after the start of the ranks."""
        return parse_moment_s(self.at)

    @property
    def text(self) -> str:
        """Description such as 'rate 20mbit, latency 5ms for hosts 1, 2 on net'."""
        values = {"rate": self.rate, "latency": self.latency, "loss": self.loss}
        what = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        where = "" if self.link is None else f" on {self.link}"
        if self.pair is not None:
            return f"{what} between hosts {self.pair[0]} and {self.pair[1]}{where}"
        if self.hosts is None:
            return f"{what} for all hosts{where}"
        hosts = ", ".join(map(str, self.hosts))
        return f"{what} for host{'s' * (len(self.hosts) > 1)} {hosts}{where}"
