"""The description of a cluster: hosts, links, rates; in Python, TOML and JSON."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from offbeat.lab.units import UNLIMITED, format_rate, format_time, parse_rate_bps, parse_time_s

MAX_HOSTS = 250  # the last byte of an address inside the lab
MAX_LINKS = 16

_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Model):
    """One network that every host is attached to, with its rate per host and direction.

    `rate` is text such as "100mbit", a number of bit/s, or None for an unshaped link; `latency` is
    the one-way delay between two hosts ("20ms", or seconds) and needs the kernel's sch_netem.
    Raises ValidationError (a ValueError) for a rate, latency or name that cannot be.
    """

    name: str = Field(default="net", pattern=_NAME)
    rate: str | float | None = UNLIMITED
    latency: str | float | None = None

    @field_validator("rate", mode="before")
    @classmethod
    def _canonical_rate(cls, value: Any) -> str:
        return format_rate(parse_rate_bps(value))

    @field_validator("latency", mode="before")
    @classmethod
    def _canonical_latency(cls, value: Any) -> str | None:
        latency_s = 0.0 if value is None else parse_time_s(value)
        return format_time(latency_s) if latency_s else None

    @property
    def rate_bps(self) -> int | None:
        """Bits per second, None if unshaped."""
        return parse_rate_bps(self.rate)

    @property
    def latency_s(self) -> float:
        """One-way delay in seconds."""
        return 0.0 if self.latency is None else parse_time_s(self.latency)


class HostOverride(_Model):
    """What is different on one host: rates by link name, number of threads."""

    host: int = Field(ge=0)
    rates: Mapping[str, str | float | None] = Field(default_factory=dict)
    threads: int | None = Field(default=None, ge=1)

    @field_validator("rates", mode="before")
    @classmethod
    def _canonical_rates(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f'rates ({value!r}) must map link names to rates: {{net = "20mbit"}}')
        return {name: format_rate(parse_rate_bps(rate)) for name, rate in value.items()}


class Cluster(_Model):
    """A cluster in a box: `hosts` hosts on shared `links`, some of them different.

    `Cluster(hosts=4, links=(Link(rate="100mbit"),))`, or shorter `Cluster.simple(4, "100mbit")`;
    in a file the two lines `hosts = 4` and `rate = "100mbit"` say the same. `threads` becomes each
    rank's OMP_NUM_THREADS; `congestion_control = "default"` keeps the kernel's. Raises
    ValidationError (a ValueError) with the relation that fails.
    """

    hosts: int = Field(ge=1, le=MAX_HOSTS)
    processes_per_host: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    congestion_control: str = Field(default="cubic", pattern=r"^[a-z0-9_-]{1,15}$")
    links: tuple[Link, ...] = (Link(),)
    overrides: tuple[HostOverride, ...] = ()

    @classmethod
    def simple(
        cls,
        hosts: int = 4,
        rate: str | float | None = None,
        *,
        latency: str | float | None = None,
        processes_per_host: int = 1,
    ) -> Self:
        """A cluster with one link, called "net"; `rate` in bit/s or text, None is unshaped."""
        link = Link(rate=rate, latency=latency)
        return cls(hosts=hosts, links=(link,), processes_per_host=processes_per_host)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file; ValueError names the file and every key that is wrong."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read TOML text; ValueError names every key that is wrong."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"not valid TOML: {error}") from None
        except ValidationError as error:
            raise ValueError(_in_words(error)) from None

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back as an equal cluster."""
        return _toml(self.record())

    def save(self, path: str | Path) -> None:
        """Write the TOML file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def record(self) -> dict[str, Any]:
        """Plain data for a run's JSON record; `Cluster(**record)` is equal to this one."""
        return self.model_dump(mode="json")

    @property
    def world_size(self) -> int:
        """Number of ranks: hosts times processes per host."""
        return self.hosts * self.processes_per_host

    def host_of(self, rank: int) -> int:
        """The host that runs this rank (ranks are numbered host by host)."""
        return rank // self.processes_per_host

    def link_index(self, name: str) -> int:
        """Position of the link in `links`; ValueError names the links that exist."""
        names = [link.name for link in self.links]
        if name not in names:
            raise ValueError(f"link ({name!r}) must be one of {names}")
        return names.index(name)

    def rate_bps(self, host: int, link: str) -> int | None:
        """Bits per second of one host's attachment to one link, None if unshaped."""
        shared = self.links[self.link_index(link)].rate_bps
        override = self._override(host)
        if override is None or link not in override.rates:
            return shared
        return parse_rate_bps(override.rates[link])

    def threads_of(self, host: int) -> int:
        """OMP_NUM_THREADS of this host's ranks."""
        override = self._override(host)
        return self.threads if override is None or override.threads is None else override.threads

    def _override(self, host: int) -> HostOverride | None:
        return next((item for item in self.overrides if item.host == host), None)

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, data: Any) -> Any:
        """`rate` and `latency` at the top describe the only link."""
        if not isinstance(data, dict) or not {"rate", "latency"} & data.keys():
            return data
        if "links" in data:
            raise ValueError(
                "rate and links are two ways to say the same; put the rate into the links"
            )
        rest = {key: value for key, value in data.items() if key not in ("rate", "latency")}
        return rest | {"links": [{"rate": data.get("rate"), "latency": data.get("latency")}]}

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        if not 1 <= len(self.links) <= MAX_LINKS:
            raise ValueError(f"links ({len(self.links)}) must be from 1 to {MAX_LINKS}")
        names = [link.name for link in self.links]
        _check_distinct("links", names, "give each link its own name")
        _check_distinct(
            "overrides", [item.host for item in self.overrides], "merge the overrides of a host"
        )
        for item in self.overrides:
            if item.host >= self.hosts:
                raise ValueError(
                    f"overrides: host ({item.host}) must be below hosts ({self.hosts}); "
                    "hosts are counted from 0"
                )
            for unknown in sorted(item.rates.keys() - set(names)):
                raise ValueError(f"overrides: rates: link ({unknown!r}) must be one of {names}")
        return self


def _check_distinct(what: str, values: list[Any], remedy: str) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{what}: {repeated[0]!r} occurs more than once; {remedy}")


def _in_words(error: ValidationError) -> str:
    """One line per mistake: where it is, the value, what it should be."""
    return "\n".join(_one_in_words(dict(item)) for item in error.errors())


def _one_in_words(item: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        key = str(item["loc"][-1])
        guess = difflib.get_close_matches(key, _known_keys(item["loc"]), n=1)
        hint = f"did you mean {guess[0]!r}?" if guess else f"known: {_known_keys(item['loc'])}"
        return f"{where}: unknown key; {hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "value_error":
        message = f"({item['input']!r}) {message[:1].lower()}{message[1:]}"
    return f"{where}: {message}" if where else message


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    models: dict[int | str, type[_Model]] = {"links": Link, "overrides": HostOverride}
    model = models.get(location[0], Cluster) if len(location) > 1 else Cluster
    short_form = ["rate", "latency"] if model is Cluster else []
    return [*model.model_fields, *short_form]


def _toml(record: dict[str, Any]) -> str:
    """TOML of flat tables and lists of flat tables (tomllib only reads)."""
    tables = {key: value for key, value in record.items() if isinstance(value, list)}
    lines = _toml_pairs({key: value for key, value in record.items() if key not in tables})
    for name, items in tables.items():
        for item in items:
            lines += ["", f"[[{name}]]", *_toml_pairs(item)]
    return "\n".join(lines) + "\n"


def _toml_pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    return json.dumps(value)  # names, rates and integers read the same in JSON and TOML
