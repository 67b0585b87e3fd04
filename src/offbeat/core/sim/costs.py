"""Time and bytes of compute, messages, votes and rules of a plan, computed from a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.codecs.cost import Encoded
from offbeat.core.derive import effects
from offbeat.core.plan import INSIDE, Apply, Plan, Transfer, base_link, groups_of
from offbeat.core.plan.program import has_moment_per_bucket, work_before
from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import Ranks

Seconds = NDArray[np.float64]


class _Message(NamedTuple):
    """Costs of a message on an idle link at the profile's rate.

    Attributes:
        seconds: seconds of the message.
        sending_s: processor seconds of the sender.
        size_bytes: bytes; half of the payload for a reduce_scatter or all_gather.
        rate_share: share of `seconds` in which the message uses the rate of the link.
        additional_s: additional seconds after a pause of the link.
    """

    seconds: float
    sending_s: float
    size_bytes: int
    rate_share: float
    additional_s: float


class Costs:
    """Seconds and bytes of compute, messages, votes and updates of one plan.

    Compute times are those of the profile, without the ranks' factors.
    """

    def __init__(self, plan: Plan, profile: Profile, ranks: Ranks) -> None:
        self.plan, self.profile = plan, profile
        self._ranks = ranks
        self._buffers = plan.all_buffers
        self._update_s = np.array(profile.bucket_update_s)
        self._alone = {
            link: {group[0] for group in groups_of(link, plan.groups) if len(group) == 1}
            for link in plan.links
            # Messages inside pass between the ranks of one replica.
            if profile.inside is None or base_link(link) != INSIDE
        }
        self._messages: dict[int, _Message] = {}
        # compute_s[place]: seconds of compute between the previous moment and the one at `place`.
        self.compute_s = np.array(
            [
                sum(self.work_s(*work) for work in self.work_before(place))
                for place in range(2 * plan.buckets + 2)
            ]
        )

    def work_before(self, place: int) -> tuple[tuple[str, int], ...]:
        """Return the compute between the previous position and this one, as (kind, bucket).

        FSDP gathers weights at moments of its own, so all messages that are due in the forward of a
        sharded replica are awaited when it begins. Its whole forward follows these moments.
        """
        work, buckets = work_before(place, self.plan.buckets), self.plan.buckets
        if not self.profile.sharded or place > buckets:
            return work
        if place < buckets:
            return ()
        return (*(("forward", b) for b in range(buckets - 1, 0, -1)), *work)

    def work_s(self, kind: str, bucket: int) -> float:
        """Return the seconds of a bucket's forward or backward."""
        facts = self.profile.buckets[bucket]
        return facts.forward_s if kind == "forward" else facts.backward_s

    def apply_s(self, apply: Apply) -> Seconds | None:
        """Return the seconds of an apply for each of its buckets, or None if it is not an update.

        Only updates take time.
        """
        if not effects.is_update(apply):
            return None
        seconds = self._update_s[apply.buckets.start : apply.buckets.stop]
        if not self.profile.step_s:
            return seconds
        # `step_s` is the time of each further optimizer call; the first one per iteration is part
        # of `update_s`. One call for the whole model has no further calls.
        whole = apply.at.point in ("step", "end") and len(apply.buckets) == self.plan.buckets
        calls = len(apply.buckets) if has_moment_per_bucket(apply) else int(not whole)
        return seconds + self.profile.step_s * calls / len(seconds)

    def message_s(self, t: Transfer, ranks: tuple[int, ...] | None = None) -> float:
        """Return the seconds of a message on an idle link.

        A rank that is a group of its own sends nothing, so its messages take 0 s.

        Args:
            t: transfer of the plan.
            ranks: ranks that take part; None for all ranks.
        """
        if ranks is not None and self._is_alone(t, ranks[0]):
            return 0.0
        return self._message(t).seconds / self._ranks.link_rate(t.link, ranks)

    def sending_s(self, t: Transfer, rank: int) -> float:
        """Return the processor seconds that a message takes from the sending rank's compute."""
        return 0.0 if self._is_alone(t, rank) else self._message(t).sending_s

    def rate_share(self, t: Transfer) -> float:
        """Return the share of a message's time in which it uses the rate of the link."""
        return self._message(t).rate_share

    def additional_s(self, t: Transfer) -> float:
        """Return the additional seconds of a message after a pause of the link."""
        return self._message(t).additional_s

    def message_bytes(self, t: Transfer, rank: int) -> int:
        """Return the bytes of a rank's message.

        A reduce_scatter or all_gather counts half, so that a pair of them counts as one all-reduce.
        A rank that is a group of its own sends 0 bytes.
        """
        return 0 if self._is_alone(t, rank) else self._message(t).size_bytes

    def _is_alone(self, t: Transfer, rank: int) -> bool:
        """Return whether the transfer is a collective in which the rank is the only member."""
        return t.ranks is None and rank in self._alone.get(t.link, ())

    def _message(self, t: Transfer) -> _Message:
        """Return the costs of a message, of the encoded payload if the transfer has a wire."""
        if id(t) not in self._messages:
            profile = self.profile
            payload = replace(t.payload, buffer=self._buffers[t.payload.buffer].kind)
            if t.wire is None:
                seconds = profile.message_s(payload, t.link, t.verb)
                transfer_s = profile.message_transfer_s(payload, t.link, t.verb)
                sending_s = profile.sending_s(payload, t.link, t.verb)
                size_bytes = profile.bytes_of(payload)
            else:
                encoded = Encoded(profile, payload, t.wire, t.verb)
                seconds, sending_s = encoded.seconds(t.link), encoded.sending_s(t.link)
                transfer_s = encoded.transfer_s(t.link)
                size_bytes = encoded.bytes
            additional_s = profile.link(t.link).additional_s(size_bytes, t.verb, profile.world_size)
            if t.verb in ("reduce_scatter", "all_gather"):
                size_bytes //= 2
            share = transfer_s / seconds if seconds else 1.0
            self._messages[id(t)] = _Message(seconds, sending_s, size_bytes, share, additional_s)
        return self._messages[id(t)]

    @property
    def vote_s(self) -> float:
        """Return the seconds from the last rank's vote until the outcome is known.

        This is the measured time, or else the time of the smallest message on the default link.
        """
        link = self.profile.default_link
        least_s = link.vote_s
        if least_s is None:
            least_s = max([link.latency_s, *(seconds for _, seconds in link.small[:1])])
        return least_s / self._ranks.link_rate(link.name)
