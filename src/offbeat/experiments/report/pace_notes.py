"""How hosts kept the pace at which they were emulated, in words."""

from __future__ import annotations

from offbeat.experiments.record.run_directory import Contestant, Run

LATE = 0.03  # share of iterations that may be late unsaid


def describe_pace(run: Run) -> list[str]:
    """What must be said before any number of a paced run is read; nothing without a pace."""
    paces = [pace for contestant in run.contestants for _, pace in _recorded_paces(contestant)]
    if not paces:
        return []
    text = (
        f"Emulated: each host computes at 1/{paces[0]['pace']:g} of this machine's core. "
        f"Messages, data and losses are real. The processors were up to {_max_busy(run):.0%} busy."
    )
    late = [words for contestant in run.contestants if (words := _describe_late_ranks(contestant))]
    if not late:
        return [text, "No host missed its pace in more than 3 % of its iterations."]
    return [text, "Hosts that were late by more than 3 % of their compute. " + " ".join(late)]


def _recorded_paces(contestant: Contestant) -> list[tuple[int, dict[str, float]]]:
    """Rank and what it recorded of its pace, over repetitions."""
    records = [r for repetition in contestant.repetitions for r in repetition.ranks]
    return [(record.rank, dict(record.pace)) for record in records if record.pace]


def _max_busy(run: Run) -> float:
    """The largest share of the machine's processors that a repetition has used."""
    shares = [0.0]
    for contestant in run.contestants:
        for repetition in contestant.repetitions:
            paces = [record.pace for record in repetition.ranks if record.pace]
            own = sum(pace["busy"] for pace in paces)
            shares.append(own + max((pace["interrupts"] for pace in paces), default=0.0))
    return max(shares)


def _describe_late_ranks(contestant: Contestant) -> str | None:
    """Ranks of one contestant, with their shares of late iterations."""
    worst, shares = 0.0, {}
    for rank in sorted({rank for rank, _ in _recorded_paces(contestant)}):
        mine = [pace for r, pace in _recorded_paces(contestant) if r == rank]
        iterations = sum(pace["iterations"] for pace in mine)
        missed = sum(pace["missed"] for pace in mine)
        if missed > LATE * iterations:
            shares[rank] = missed / iterations
            worst = max([worst, *(pace["worst"] for pace in mine)])
    if not shares:
        return None
    ranks = ", ".join(f"rank {rank} in {share:.0%}" for rank, share in shares.items())
    return f"{contestant.label}: {ranks} of its iterations, at worst by {worst:.0%}."
