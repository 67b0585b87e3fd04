"""Description of a cluster: hosts, links, rates and changes, in Python, TOML and JSON."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from offbeat.core.files import write_text
from offbeat.core.plan import INSIDE
from offbeat.core.units import parse_loss, parse_rate_bps, parse_time_s
from offbeat.lab.parts import (
    Change,
    HostOverride,
    Link,
    Pair,
    Part,
    optional,
    rate_text,
)
from offbeat.lab.switch.link_state import Way

MAX_HOSTS = 250  # largest number of hosts, limited by the last byte of an address in the lab
MAX_LINKS = 16

_SHORT_FORM = ("rate", "uplink", "latency", "loss")  # top-level keys that describe the only link


class Cluster(Part):
    """Cluster of `hosts` hosts on shared `links`.

    `Cluster(hosts=4, links=(Link(rate="100mbit"),))` is the same as `Cluster.simple(4, "100mbit")`,
    and as a file with the two lines `hosts = 4` and `rate = "100mbit"`.

    Attributes:
        hosts: number of hosts.
        processes_per_host: number of ranks on each host, each with a replica of its own.
        ranks: number of ranks on each host that share a replica (a node); None for
            `processes_per_host` ranks.
        inside: rate of each host's loopback, over which its ranks send to each other; text such as
            "10gbit"; None for an unshaped one. Requires `ranks`.
        threads: OMP_NUM_THREADS of each rank.
        congestion_control: TCP congestion control; "default" keeps that of the kernel.
        links: networks that connect all hosts.
        overrides: settings of hosts that differ from the others.
        pairs: settings between two hosts that differ.
        changes: values that change while ranks run.

    Raises:
        ValidationError: a relation between values is violated; the message names it (a ValueError).
    """

    hosts: int = Field(ge=1, le=MAX_HOSTS)
    processes_per_host: int = Field(default=1, ge=1)
    ranks: int | None = Field(default=None, ge=1)
    inside: Annotated[str | float | None, optional(rate_text)] = None
    threads: int = Field(default=1, ge=1)
    congestion_control: str = Field(default="cubic", pattern=r"^[a-z0-9_-]{1,15}$")
    links: tuple[Link, ...] = (Link(),)
    overrides: tuple[HostOverride, ...] = ()
    pairs: tuple[Pair, ...] = ()
    changes: tuple[Change, ...] = ()

    @classmethod
    def simple(
        cls,
        hosts: int = 4,
        rate: str | float | None = None,
        *,
        latency: str | float | None = None,
        loss: str | float = 0.0,
        processes_per_host: int = 1,
        ranks: int | None = None,
        inside: str | float | None = None,
    ) -> Self:
        """Return a cluster with one link, named "net".

        Args:
            hosts: number of hosts.
            rate: text such as "100mbit", or bit/s; None is unshaped.
            latency: one-way delay between two hosts.
            loss: share of packets that are lost.
            processes_per_host: number of ranks on each host, each with a replica of its own.
            ranks: number of ranks on each host that share a replica.
            inside: rate of each host's loopback.
        """
        link = Link(rate=rate, latency=latency, loss=loss)
        return cls(
            hosts=hosts,
            links=(link,),
            processes_per_host=processes_per_host,
            ranks=ranks,
            inside=inside,
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file.

        Args:
            path: file to read.

        Raises:
            ValueError: the file is not valid. The message names the file and every invalid key.
        """
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read TOML text.

        Args:
            text: content of a TOML file.

        Raises:
            ValueError: the text is not valid. The message names every invalid key.
        """
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"not valid TOML: {error}") from None
        except ValidationError as error:
            known = _known_keys()
            texts = [_describe_error(item, known) for item in error.errors()]
            raise ValueError("\n".join(texts)) from None

    def to_toml(self) -> str:
        """Return TOML text from which `from_toml` reads an equal cluster."""
        return _toml_text(self.record())

    def save(self, path: str | Path) -> None:
        """Write the TOML file.

        Args:
            path: file to write.
        """
        write_text(path, self.to_toml())

    def record(self) -> dict[str, Any]:
        """Return plain data for the JSON record of a run; `Cluster(**record)` is equal to this
        cluster."""
        absent = {name for name in ("ranks", "inside") if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=absent)

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return sum(map(self.ranks_of, range(self.hosts)))

    def ranks_of(self, host: int) -> int:
        """Return the number of ranks on a host.

        Args:
            host: number of the host.
        """
        return self._override(host).ranks or self.ranks or self.processes_per_host

    def first_rank(self, host: int) -> int:
        """Return the first rank on a host.

        Args:
            host: number of the host.
        """
        return sum(map(self.ranks_of, range(host)))

    def host_of(self, rank: int) -> int:
        """Return the host that runs a rank. Ranks are numbered host by host.

        Args:
            rank: number of the rank.
        """
        stops = accumulate(map(self.ranks_of, range(self.hosts)))
        return next(host for host, stop in enumerate(stops) if rank < stop)

    def link_index(self, name: str) -> int:
        """Return the index of a link in `links`.

        Args:
            name: name of the link.

        Raises:
            ValueError: the cluster has no such link. The message names the links.
        """
        names = [link.name for link in self.links]
        if name not in names:
            raise ValueError(f"link ({name!r}) must be one of {names}")
        return names.index(name)

    def rate_bps(self, host: int, link: str) -> int | None:
        """Return the bits per second at which a host receives on a link; None if unshaped.

        Args:
            host: number of the host.
            link: name of the link.
        """
        shared = self.links[self.link_index(link)]
        return parse_rate_bps(self._override(host).rates.get(link, shared.rate))

    def uplink_bps(self, host: int, link: str) -> int | None:
        """Return the bits per second at which a host sends on a link; None if unshaped.

        Args:
            host: number of the host.
            link: name of the link.
        """
        shared, own = self.links[self.link_index(link)], self._override(host)
        if link in own.uplinks:
            return parse_rate_bps(own.uplinks[link])
        if link in own.rates or shared.uplink is None:
            return self.rate_bps(host, link)
        return parse_rate_bps(shared.uplink)

    def attachment(self, host: int, link: str) -> Way:
        """Return the configured values of all ways from and to a host on one link; the rate is
        that of the slower direction.

        Args:
            host: number of the host.
            link: name of the link.
        """
        shared, own = self.links[self.link_index(link)], self._override(host)
        latency = own.latencies.get(link, shared.latency_s)
        return Way(
            _smallest(self.rate_bps(host, link), self.uplink_bps(host, link)),
            parse_time_s(latency),
            parse_loss(own.losses.get(link, shared.loss)),
        )

    def way(self, one: int, other: int, link: str) -> Way:
        """Return the configured values from one host to another.

        The smaller rate, the larger delay and the larger loss of both hosts apply. A pair's rate is
        a further limit; its delay and loss replace those of the hosts.

        Args:
            one: number of the sending host.
            other: number of the receiving host.
            link: name of the link.
        """
        ends = [self.attachment(host, link) for host in (one, other)]
        pair = next((p for p in self.pairs if set(p.hosts) == {one, other}), None)
        rates = [self.uplink_bps(one, link), self.rate_bps(other, link)]
        latency_s = max(way.latency_s for way in ends)
        loss = max(way.loss for way in ends)
        if pair is not None:
            rates.append(parse_rate_bps(pair.rates.get(link)))
            latency_s = parse_time_s(pair.latencies.get(link, latency_s))
            loss = parse_loss(pair.losses.get(link, loss))
        return Way(_smallest(*rates), latency_s, loss)

    def threads_of(self, host: int) -> int:
        """Return OMP_NUM_THREADS of a host's ranks.

        Args:
            host: number of the host.
        """
        return self._override(host).threads or self.threads

    def speed_of(self, host: int) -> float:
        """Return the compute speed of a host relative to the other hosts.

        Args:
            host: number of the host.
        """
        return self._override(host).speed

    def jitter_of(self, host: int) -> float:
        """Return the sigma of the lognormal factor on a host's compute.

        Args:
            host: number of the host.
        """
        return self._override(host).jitter

    def _override(self, host: int) -> HostOverride:
        return next((item for item in self.overrides if item.host == host), HostOverride(host=host))

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, data: Any) -> Any:
        """Replace top-level values of a link by a list of one link."""
        if not isinstance(data, dict):
            return data
        given = [key for key in _SHORT_FORM if key in data]
        if not given:
            return data
        if "links" in data:
            raise ValueError(
                f"{given[0]} and links are two ways to say the same; put the {given[0]} into the "
                "links"
            )
        rest = {key: value for key, value in data.items() if key not in given}
        return rest | {"links": [{key: data[key] for key in given}]}

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        if not 1 <= len(self.links) <= MAX_LINKS:
            raise ValueError(f"links ({len(self.links)}) must be from 1 to {MAX_LINKS}")
        if self.ranks is None:
            self._require_no_nodes()
        elif self.processes_per_host != 1:
            raise ValueError(
                f"processes_per_host ({self.processes_per_host}) must be left out where ranks "
                f"({self.ranks}) is given: either each rank of a host has a replica of its own, or "
                "they share one"
            )
        names = [link.name for link in self.links]
        if self.ranks is not None and INSIDE in names:
            raise ValueError(f"links: {INSIDE!r} is the link inside hosts; give another name")
        _check_distinct("links", names, "give each link its own name")
        _check_distinct(
            "overrides", [item.host for item in self.overrides], "merge the overrides of a host"
        )
        _check_distinct(
            "pairs", [tuple(sorted(item.hosts)) for item in self.pairs], "merge the two pairs"
        )
        for what, hosts, links in self._mentions():
            for host in hosts:
                self._check_host(what, host)
            for unknown in sorted(set(links) - set(names)):
                raise ValueError(f"{what}: link ({unknown!r}) must be one of {names}")
        return self

    def _require_no_nodes(self) -> None:
        """Raise ValueError if a value needs ranks that share a replica."""
        if self.inside is not None:
            raise ValueError(
                f"inside ({self.inside}) must come with ranks, the number of ranks on each host "
                "that send over it"
            )
        if any(item.ranks is not None for item in self.overrides):
            raise ValueError("overrides: ranks must come with ranks of the cluster, for all hosts")

    def _mentions(self) -> Iterator[tuple[str, Iterable[int], Iterable[str]]]:
        """Yield each place with the hosts and links that it names."""
        for item in self.overrides:
            yield "overrides", [item.host], ()
        for item in self.pairs:
            yield "pairs", item.hosts, ()
        for item in (*self.overrides, *self.pairs):
            what = "overrides" if isinstance(item, HostOverride) else "pairs"
            for name in ("rates", "uplinks", "latencies", "losses"):
                yield f"{what}: {name}", (), getattr(item, name, ())
        for change in self.changes:
            where = f"changes: at {change.at}"
            yield where, change.hosts or change.pair or (), [change.link] if change.link else ()

    def _check_host(self, what: str, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(
                f"{what}: host ({host}) must be below hosts ({self.hosts}); "
                "hosts are counted from 0"
            )


def _smallest(*rates_bps: int | None) -> int | None:
    return min((rate for rate in rates_bps if rate is not None), default=None)


def _check_distinct(what: str, values: list[Any], remedy: str) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{what}: {repeated[0]!r} occurs more than once; {remedy}")


def _known_keys() -> Mapping[str, list[str]]:
    tables: dict[str, type[Part]] = {
        "links": Link,
        "overrides": HostOverride,
        "pairs": Pair,
        "changes": Change,
    }
    known = {name: list(table.model_fields) for name, table in tables.items()}
    return known | {"": [*Cluster.model_fields, *_SHORT_FORM]}


# --- messages for errors in a cluster file: location, value and expected value ---


def _describe_error(item: Mapping[str, Any], known: Mapping[str, list[str]]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        *table, key = map(str, item["loc"])
        keys = known.get(table[0] if table else "", known[""])
        guess = difflib.get_close_matches(key, keys, n=1)
        hint = f"did you mean {guess[0]!r}?" if guess else f"known: {list(keys)}"
        return f"{where}: unknown key; {hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "value_error":
        message = f"({item['input']!r}) {message[:1].lower()}{message[1:]}"
    return f"{where}: {message}" if where else message


# --- TOML text of flat tables and lists of flat tables, as tomllib only reads TOML ---


def _toml_text(record: dict[str, Any]) -> str:
    """Return plain data as TOML without None and empty tables."""
    tables = {k: v for k, v in record.items() if isinstance(v, list)}
    lines = _toml_pairs({k: v for k, v in record.items() if k not in tables})
    for name, items in tables.items():
        for item in items:
            lines += ["", f"[[{name}]]", *_toml_pairs(item)]
    return "\n".join(lines) + "\n"


def _toml_pairs(table: dict[str, Any]) -> list[str]:
    return [
        f"{key} = {_toml_value(value)}" for key, value in table.items() if value not in (None, {})
    ]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }"
    # JSON and TOML have the same syntax for strings, numbers and lists.
    return json.dumps(value)
