"""Command `offbeat graph`: gossip constants and exchange rates of a graph."""

from __future__ import annotations

from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from offbeat.cli.entry import app
from offbeat.cli.options import Json, number, option
from offbeat.cli.output import print_result

if TYPE_CHECKING:
    import networkx as nx

    from offbeat.gossip.graphs import Constants, Edge

MEANINGS = {
    "lambda2": ("lambda_2", "how well the graph holds together"),
    "chi1": ("chi1", "1 / lambda_2"),
    "chi2": ("chi2", "half the largest resistance of an edge"),
    "eta": ("eta", "mixing of x and x~ per unit time"),
    "alpha": ("alpha", "share of a difference that x takes over"),
    "alpha_tilde": ("alpha_tilde", "the same of x~"),
}


@app.command
def graph(
    *,
    topology: Annotated[
        str,
        option(
            "complete, ring, star, exponential, torus, random-regular, random-regular:DEGREE, or "
            "edges as in 0-1,1-2,2-0; measured: the best graph for the links of --cluster."
        ),
    ] = "ring",
    workers: Annotated[int | None, number("Number of workers.  [default: 4]")] = None,
    rate: Annotated[
        float, option("Exchanges of a worker per unit of time (mean time of a gradient).")
    ] = 1.0,
    seed: Annotated[int, number("Seed of a random graph.")] = 0,
    cluster: Annotated[Path | None, option("Cluster file (TOML) of topology `measured`.")] = None,
    mb: Annotated[float, option("Megabytes per exchange and direction, for `measured`.")] = 4.0,
    json_: Json = False,
) -> int:
    """Show the exchanges of a gossip graph and its constants for A2CiD2.

    Example: offbeat graph --topology ring --workers 16
    """
    from offbeat.gossip import graphs

    if topology == "measured" and cluster is not None:
        made = _measured_graph(cluster, mb, seed)
        if workers not in (None, len(made)):
            raise ValueError(f"workers ({workers}) must be the hosts of --cluster ({len(made)})")
    elif cluster is not None:
        raise ValueError(f"cluster ({cluster}) must come with --topology measured")
    else:
        made = graphs.topology(topology, 4 if workers is None else workers, seed=seed)
    workers = len(made)
    rates = graphs.edge_rates(made, rate)
    gossip_constants = graphs.constants(rates, workers)
    data = _data(topology, rate, rates, gossip_constants, workers)
    print_result(json_, data, _text(topology, rate, rates, gossip_constants, made))
    return 0


def _measured_graph(cluster: Path, mb: float, seed: int) -> nx.Graph:
    """Return the graph with the fastest consensus if only the cluster's links limit exchanges."""
    import numpy as np

    from offbeat.gossip.measured_graph import measured
    from offbeat.lab import Cluster

    asked = Cluster.load(cluster)
    link = asked.links[0].name
    rate, delay = np.full((2, asked.hosts, asked.hosts), np.inf)
    for i, j in permutations(range(asked.hosts), 2):
        way = asked.way(i, j, link)
        rate[i, j] = np.inf if way.rate_bps is None else way.rate_bps / 8
        delay[i, j] = way.latency_s
    return measured(rate, delay, mb * 1e6, even=True, seed=seed).graph


def _data(
    topology: str, rate: float, rates: dict[Edge, float], found: Constants, workers: int
) -> dict[str, Any]:
    return {
        "topology": topology,
        "workers": workers,
        "rate": rate,
        **asdict(found),
        "exchanges": sum(rates.values()),
        "per_worker": _per_worker(rates, workers),
        "edges": [[i, j, one] for (i, j), one in rates.items()],
    }


def _text(
    topology: str, rate: float, rates: dict[Edge, float], found: Constants, made: nx.Graph
) -> str:
    lines = [f"{topology}: {len(made)} workers, {len(rates)} edges, rate {rate:g}", ""]
    for field, (name, meaning) in MEANINGS.items():
        lines.append(f"{name:<12} {getattr(found, field):<10.4g} {meaning}")
    shares = _per_worker(rates, len(made))
    least, most = (f"{one:.4g}" for one in (min(shares), max(shares)))
    spread = least if least == most else f"{least} to {most}"
    total = sum(rates.values())
    lines.append(f"{'exchanges':<12} {total:<10.4g} per unit time; {spread} of each worker")
    return "\n".join(lines)


def _per_worker(rates: dict[Edge, float], workers: int) -> list[float]:
    return [sum(one for edge, one in rates.items() if i in edge) for i in range(workers)]
