"""Sentences about the adherence of emulated hosts to their pace."""

from __future__ import annotations

from offbeat.experiments.record.run_directory import Contestant, Run

LATE = 0.03  # share of late iterations up to which a host is not reported


def describe_pace(run: Run) -> list[str]:
    """Return the banner of a paced run; empty without a pace."""
    paces = [pace for contestant in run.contestants for _, pace in _recorded_paces(contestant)]
    if not paces:
        return []
    text = (
        f"Emulated: each host computes at 1/{paces[0]['pace']:g} of this machine's core. "
        "Messages, data and losses are real. "
        f"The processors were up to {100 * _max_busy(run):.0f} % busy."
    )
    late = [
        f"{contestant.label}: {sentence}"
        for contestant in run.contestants
        for sentence in describe_late_hosts(contestant)
    ]
    return [text, *(late or ["No host missed its pace in more than 3 % of its iterations."])]


def _recorded_paces(contestant: Contestant) -> list[tuple[int, dict[str, float]]]:
    """Return (rank, record of its pace) for all repetitions."""
    records = [r for repetition in contestant.repetitions for r in repetition.ranks]
    return [(record.rank, dict(record.pace)) for record in records if record.pace]


def _max_busy(run: Run) -> float:
    """Return the largest share of the processors that a repetition used."""
    shares = [0.0]
    for contestant in run.contestants:
        for repetition in contestant.repetitions:
            paces = [record.pace for record in repetition.ranks if record.pace]
            own = sum(pace["busy"] for pace in paces)
            shares.append(own + max((pace["interrupts"] for pace in paces), default=0.0))
    return max(shares)


def describe_late_hosts(contestant: Contestant) -> list[str]:
    """Return a sentence about the late ranks of a contestant; empty without late ranks."""
    worst, shares = 0.0, {}
    for rank in sorted({rank for rank, _ in _recorded_paces(contestant)}):
        paces = [pace for r, pace in _recorded_paces(contestant) if r == rank]
        iterations = sum(pace["iterations"] for pace in paces)
        missed = sum(pace["missed"] for pace in paces)
        if missed > LATE * iterations:
            shares[rank] = missed / iterations
            worst = max([worst, *(pace["worst"] for pace in paces)])
    if not shares:
        return []
    ranks = ", ".join(f"of rank {rank} in {100 * share:.0f} %" for rank, share in shares.items())
    return [f"Hosts were late: {ranks} of the iterations, at worst by {100 * worst:.0f} %."]
