"""DeFT's models on 16 GPUs in the simulator: iteration times, merges and expected loss.

    python benchmarks/papers/deft.py [--json FILE]

VGG-19: Table II of the DeFT paper, with bucket 1's communication at 11,968 us (1,968 as printed
does not add up to the printed total). ResNet-101 and GPT-2: the sums of Table I; ResNet-101 divided
as its architecture is, GPT-2 into 13 equal buckets, as Figure 13 describes them. No latency and no
time for updates. Writes results/deft.json. Needs no torch; seconds.
"""

import argparse
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from offbeat.core.strategy.interface import Strategy
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import DDP, WFBP, ByteScheduler, USByte
from offbeat.strategies.deft import DeFT
from offbeat.strategies.solvers import preserver

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

import architectures
import tables

# Output side first: forward, backward, communication in us.
BUCKETS = {
    6: (103, 162, 8651),
    5: (326, 484, 31754),
    4: (1899, 2319, 178643),
    3: (4801, 4872, 15447),
    2: (28799, 12786, 11262),
    1: (1238, 72496, 11968),
}
PARAMETERS = 143_652_544
MU = 1.65  # how much slower gloo is than NCCL
WHOLE = PARAMETERS  # elements: nothing is cut but what does not fit a window
SINGLE_STEPS = (0.2103, 0.2054, 0.1989, 0.1967, 0.1922)  # Table V, row O_B
ETA = 0.01


def profile(mus: dict[str, float]) -> Profile:
    """The model on links that take so many times the measured communication."""
    total_us = sum(row[2] for row in BUCKETS.values())
    return Profile(
        tuple(
            Bucket(
                f"bucket {number}",
                forward_s=forward * 1e-6,
                backward_s=backward * 1e-6,
                size_bytes=round(4 * PARAMETERS * us / total_us),
                communication_s={link: mu * us * 1e-6 for link, mu in mus.items()},
            )
            for number, (forward, backward, us) in BUCKETS.items()
        ),
        tuple(Link(link, 0.0, 4e6 * PARAMETERS / mu / total_us) for link, mu in mus.items()),
        world_size=16,
    )


def table_v() -> float:
    """Expected loss after single steps over that after the merges of two links."""
    mu = [(before - after) / ETA for before, after in pairwise(SINGLE_STEPS)]
    return preserver.LossWalk(SINGLE_STEPS[0], ETA, sigma=0.0).ratio([2, 1, 1], mu)


COMPUTE_S = {"ResNet-101": (0.059, 0.118), "GPT-2": (0.169, 0.381)}  # Table I
COMMUNICATION_S = {"ResNet-101": 0.242, "GPT-2": 0.5464}
PRINTED_COVERAGE = {"ResNet-101": 1.67, "VGG-19": 1.98, "GPT-2": 0.99}
MODELS = ("ResNet-101", "VGG-19", "GPT-2")
BANDWIDTHS = (40, 30, 20, 10)  # Gbit/s; Table I is at 40
PARTITIONS = (3_000_000, 4_000_000, 6_500_000, 8_000_000, 10_000_000)
TWO_LINKS = {"nccl": 1.0, "gloo": MU}


def model_profile(model: str, mus: dict[str, float]) -> Profile:
    """Return the profile of a model of Table I on links that are so many times slower."""
    if model == "VGG-19":
        return profile(mus)
    (forward_s, backward_s), total_s = COMPUTE_S[model], COMMUNICATION_S[model]
    layers = [architectures.Layer(6_300_000, 1)] * 13
    if model == "ResNet-101":
        layers = architectures.resnet([3, 4, 23, 3], bottleneck=True, image=224, classes=1000)
    speeds = [1 / mu for mu in mus.values()]
    return architectures.profile(layers, forward_s + backward_s, total_s, 16, speeds)


def at(bandwidth: int, measured: Profile) -> Profile:
    """Return the profile at another bandwidth of the links than 40 Gbit/s."""
    slower = 40 / bandwidth
    buckets = [
        replace(b, communication_s={name: slower * s for name, s in b.communication_s.items()})
        for b in measured.buckets
    ]
    links = [replace(link, bytes_per_s=link.bytes_per_s / slower) for link in measured.links]
    return replace(measured, buckets=tuple(buckets), links=tuple(links))


def milliseconds(strategy: Strategy, measured: Profile) -> float:
    return round(1e3 * predict(strategy, measured).iteration_s, 1)


def coverage_row(model: str) -> list[object]:
    """Return compute and communication of a model in ms, their quotient, and the printed one."""
    measured = model_profile(model, {"nccl": 1.0})
    compute_s = measured.forward_s + measured.backward_s
    total_bytes = sum(bucket.size_bytes for bucket in measured.buckets)
    communication_s = total_bytes / measured.default_link.bytes_per_s
    milliseconds = [round(1e3 * seconds, 1) for seconds in (compute_s, communication_s)]
    return [model, *milliseconds, round(communication_s / compute_s, 2), PRINTED_COVERAGE[model]]


def speeds_row(name: str, one: Profile, two: Profile) -> list[object]:
    """Return the times of four schemes, and how many times faster DeFT is than each of them."""
    others = [milliseconds(s, one) for s in (DDP(), ByteScheduler(), USByte())]
    deft = predict(DeFT(), two)
    own = round(1e3 * deft.iteration_s, 1)
    merges = str(deft.plan.fact("merges", [1])) if deft.plan is not None else ""
    ratios = [round(other / own, 2) for other in others]
    return [name, *others, milliseconds(DeFT(), one), own, merges, *ratios]


def result() -> dict[str, object]:
    """Return the result `deft`."""
    columns = ["DDP", "ByteScheduler", "US-Byte", "DeFT, one link", "DeFT, two links", "merges"]
    columns += [f"DeFT over {name}" for name in ("DDP", "ByteScheduler", "US-Byte")]
    links = ({"nccl": 1.0}, TWO_LINKS)
    models = {model: [model_profile(model, mus) for mus in links] for model in MODELS}
    return {
        "title": "DeFT's speed-ups in the simulator",
        "what": "Models of DeFT's Table I on 16 GPUs: VGG-19 by Table II, ResNet-101 by its architecture, GPT-2 as 13 equal buckets. The second link is 1.65 times slower. Messages have no latency; merges are limited to 4; without statistics of gradients the Preserver has nothing to estimate.",  # noqa: E501
        "how": ["simulated"],
        "date": "2026-11-24",
        "machine": "not relevant: virtual time",
        "command": "python benchmarks/papers/deft.py",
        "tables": [
            {
                "name": "speed-ups",
                "title": "Milliseconds per iteration at 40 Gbit/s; speed-ups of DeFT on two links",
                "columns": ["model", *columns],
                "rows": [speeds_row(model, *found) for model, found in models.items()],
            },
            {
                "name": "bandwidths",
                "title": "The same at other bandwidths",
                "columns": ["model and Gbit/s", *columns],
                "rows": [
                    speeds_row(f"{model}, {rate}", *(at(rate, one) for one in found))
                    for model, found in models.items()
                    for rate in BANDWIDTHS
                ],
            },
            {
                "name": "table-1",
                "title": "Coverage rates of Table I, from its times",
                "columns": ["model", "compute, ms", "communication, ms", "coverage", "printed"],
                "rows": [coverage_row(model) for model in MODELS],
            },
            {
                "name": "table-5",
                "title": "Ratio of expected losses with merges of two links, without noise",
                "columns": ["table", "here", "printed"],
                "rows": [["Table V", round(table_v(), 4), 0.993]],
            },
            {
                "name": "partitions",
                "title": "VGG-19 with other largest messages, milliseconds per iteration",
                "columns": ["elements", "ByteScheduler", "DeFT, two links"],
                "rows": [
                    [
                        size,
                        milliseconds(ByteScheduler(partition_elements=size), models["VGG-19"][0]),
                        milliseconds(DeFT(partition_elements=size), models["VGG-19"][1]),
                    ]
                    for size in PARTITIONS
                ],
            },
            {
                "name": "coverage",
                "title": "GPT-2's buckets with a tenth of the communication",
                "columns": ["model", *columns],
                "rows": [speeds_row("coverage .1", *(at(400, one) for one in models["GPT-2"]))],
            },
        ],
        "misses": [],
        "notes": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    one, two = profile({"nccl": 1.0}), profile({"nccl": 1.0, "gloo": MU})
    cases: list[tuple[str, Strategy, Profile, float]] = [
        ("WFBP, one message per bucket", WFBP(fusion="none"), one, 295.1),
        ("ByteScheduler", ByteScheduler(), one, 258.3),
        ("DeFT, one link", DeFT(partition_elements=WHOLE), one, 130.3),
        ("DeFT, two links", DeFT(partition_elements=WHOLE), two, 130.3),
    ]
    report: dict[str, object] = {}
    print("| schedule | ms per iteration | expected | merges |\n|---|---|---|---|")
    for label, strategy, measured, expected_ms in cases:
        prediction = predict(strategy, measured)
        iteration_ms = 1e3 * prediction.iteration_s
        merges = prediction.plan.fact("merges", [1])
        print(f"| {label} | {iteration_ms:.1f} | {expected_ms} | {merges} |")
        report[label] = {"ms": iteration_ms, "expected_ms": expected_ms, "merges": merges}
    report["table V"] = ratio = table_v()
    print(f"\nTable V, ratio of expected losses: {ratio:.4f} (paper: 0.993)")
    tables.save("deft", result())
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
