"""What the samplers cost: the first sample of an epoch, a whole epoch, memory; per worker.

    python benchmarks/data.py [--samples N] [--workers N]

torch's DistributedSampler is the yardstick. Takes about half a minute.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterable
from statistics import median

from torch.utils.data import DistributedSampler

from offbeat.data import DefDP, SelDP

REPETITIONS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1_281_167, help="as ImageNet-1k has")
    parser.add_argument("--workers", type=int, default=16)
    args = parser.parse_args()
    data, place = range(args.samples), {"rank": 1, "world_size": args.workers}
    samplers = {
        "DistributedSampler": DistributedSampler(data, args.workers, 1),  # type: ignore[arg-type]
        "DefDP": DefDP(data, **place),
        "SelDP": SelDP(data, **place),
    }
    print("| sampler | samples | first sample, ms | epoch, ms | us per sample | memory, MB |")
    print("|---|---|---|---|---|---|")
    for name, sampler in samplers.items():
        first = spread(lambda s=sampler: next(iter(s)))
        epoch = spread(lambda s=sampler: exhaust(s))
        each = 1e3 * epoch[1] / len(sampler)
        cells = [name, str(len(sampler)), words(first), words(epoch), f"{each:.3f}"]
        print("|", " | ".join([*cells, f"{peak_bytes(sampler) / 1e6:.1f}"]), "|")


def exhaust(sampler: Iterable[int]) -> None:
    for _ in sampler:
        pass


def spread(work: Callable[[], object]) -> tuple[float, float, float]:
    """Least, median and most milliseconds."""
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), median(times), max(times)


def words(times: tuple[float, float, float]) -> str:
    least, middle, most = times
    return f"{middle:.3g} [{least:.3g}, {most:.3g}]"


def peak_bytes(sampler: Iterable[int]) -> int:
    """Python's and NumPy's memory while an epoch begins; torch's own is not seen."""
    tracemalloc.start()
    next(iter(sampler))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    main()
