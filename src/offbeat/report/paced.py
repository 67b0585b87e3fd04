"""How hosts kept the pace at which they were emulated, in words."""

from __future__ import annotations

from offbeat.report.run import Contestant, RankRecord, Run

LATE = 0.03  # share of iterations that may be late unsaid


def pace_in_words(run: Run) -> list[str]:
    """What must be said before any number of a paced run is read; nothing without a pace."""
    kept = [(c, r) for c in run.contestants for rep in c.repetitions for r in rep.ranks if r.pace]
    if not kept:
        return []
    pace = max(record.pace["pace"] for _, record in kept if record.pace)
    text = (
        f"Emulated: each host computes at 1/{pace:g} of this machine's core. Messages, data and "
        f"losses are real. The processors were up to {max(_busy(run)):.0%} busy."
    )
    late = [words for contestant, record in kept if (words := _late(contestant, record))]
    if not late:
        return [text, "No host missed its pace in more than 3 % of its iterations."]
    return [text, "Late by more than 3 % of their compute: " + "; ".join(late) + "."]


def _busy(run: Run) -> list[float]:
    """By repetition: the share of the machine's processors that was in use."""
    shares = [0.0]
    for contestant in run.contestants:
        for repetition in contestant.repetitions:
            paces = [record.pace for record in repetition.ranks if record.pace]
            own = sum(pace["busy"] for pace in paces)
            shares.append(own + max((pace["interrupts"] for pace in paces), default=0.0))
    return shares


def _late(contestant: Contestant, record: RankRecord) -> str | None:
    pace = record.pace
    if pace is None or pace["missed"] <= LATE * pace["iterations"]:
        return None
    return (
        f"rank {record.rank} under {contestant.label} in {pace['missed']:.0f} of "
        f"{pace['iterations']:.0f} iterations, by {pace['worst']:.0%} at worst"
    )
