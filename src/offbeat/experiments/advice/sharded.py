"""Iterations of ZeRO-3 and HSDP across machines, by equations.

Words: M ranks, layers 1 to L in the order of the forward, f_l and b_l the seconds of a layer's
forward and backward, p_l the bytes of its parameters. A ring all-gather or reduce-scatter of x
bytes sends (M - 1) / M x bytes per rank, and an all-reduce twice as many, so
`Profile.message_s` gives their seconds a(x), r(x) and c(x) on one link that carries one message at
a time.

ZeRO-3 (`fully_shard` over all ranks) gathers the parameters of a layer before its forward and once
more before its backward, and scatters its gradients afterwards: 3 (M - 1) / M of the model's bytes
per iteration, where DDP has 2 (M - 1) / M.

    forward:   G_l = max(G_(l-1), S_(l-1)) + a(p_l)        the gather of layer l ends
               S_l = max(S_(l-1) + f_(l-1), G_l)           its forward begins
    backward:  the same over l = L .. 1 with b_l, and
               R_l = max(R_(l+1), S_l + b_l, ...) + r(p_l) the reduce-scatter of layer l ends

A gather is issued when the compute of the layer before it begins (prefetching of one layer). The
link carries messages in the order of issue: the gather for layer l - 1, which is issued at S_l,
precedes the reduce-scatter of layer l, which is issued at S_l + b_l. The iteration ends after the
last reduce-scatter, and each rank updates its own shard: update_s / M.

HSDP shards inside a machine and all-reduces between the N machines. Each rank sends its shard, and
all shards of a machine share its network, so a layer costs c(p_l) of N ranks:

    R_l = max(R_(l+1), end of b_l) + c(p_l)

Messages inside a machine count as free. Both take at least the larger of compute and communication
(`bound_s`), and at most their sum (`unhidden_s`). On CPUs they take the sum: FSDP issues messages
on streams of the device, and without streams each of them blocks the compute that issues it.

Sources: Rajbhandari et al., ZeRO, SC 2020, section 7 (volume of messages); Zhao et al., PyTorch
FSDP, VLDB 2023, sections 3.2.2 (hybrid sharding) and 3.3 (order and prefetching of messages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.core.plan import Kind, Payload, Verb
from offbeat.core.profile import Profile


@dataclass(frozen=True)
class ShardedIteration:
    """Predicted iteration of a sharded method.

    Attributes:
        iteration_s: seconds with messages hidden as far as the order of issue allows.
        bound_s: seconds if all messages were hidden that fit under compute.
        unhidden_s: seconds if no message were hidden.
        sent_bytes: payload bytes of a rank's messages. An all-gather or reduce-scatter counts half
            its payload, as in `Prediction.bytes_per_iteration`.
    """

    iteration_s: float
    bound_s: float
    unhidden_s: float
    sent_bytes: float


def zero3(profile: Profile) -> ShardedIteration:
    """Return the iteration of ZeRO-3 over all ranks of a profile.

    Args:
        profile: profile with one rank per device.
    """
    slowest, ranks = profile.slowest(), profile.world_size
    gather_s = _message_s(slowest, "param", "all_gather")
    scatter_s = _message_s(slowest, "grad", "reduce_scatter")
    forward_s = [b.forward_s for b in slowest.buckets]
    backward_s = [b.backward_s for b in slowest.buckets]
    first_s = _forward_end_s(forward_s[::-1], gather_s[::-1])
    total_s = slowest.other_s + first_s + _backward_end_s(backward_s, gather_s, scatter_s)
    update_s = slowest.update_s / ranks
    compute_s = slowest.other_s + slowest.forward_s + slowest.backward_s + update_s
    messages_s = 2 * sum(gather_s) + sum(scatter_s)
    everything = range(len(profile.buckets))
    held = [profile.payload_bytes(kind, everything) for kind in ("param", "param", "grad")]
    return ShardedIteration(
        iteration_s=total_s + update_s,
        bound_s=max(compute_s, messages_s),
        unhidden_s=compute_s + messages_s,
        sent_bytes=sum(held) / 2,
    )


def hsdp(profile: Profile, shards: int) -> ShardedIteration:
    """Return the iteration of HSDP.

    Args:
        profile: profile of one rank per machine, whose link is the machine's network.
        shards: number of devices of a machine.
    """
    slowest = profile.slowest()
    message_s = _message_s(slowest, "grad", "all_reduce")
    ready_s, sent_s = 0.0, 0.0
    for bucket, seconds in zip(slowest.buckets, message_s, strict=True):
        ready_s += bucket.backward_s
        sent_s = max(sent_s, ready_s) + seconds
    local_s = slowest.other_s + slowest.forward_s + slowest.update_s / shards
    compute_s = local_s + slowest.backward_s
    return ShardedIteration(
        iteration_s=local_s + max(slowest.backward_s, sent_s),
        bound_s=max(compute_s, sum(message_s)),
        unhidden_s=compute_s + sum(message_s),
        sent_bytes=profile.payload_bytes("grad", range(len(profile.buckets))),
    )


def _message_s(profile: Profile, kind: Kind, verb: Verb) -> list[float]:
    """Return the seconds of each bucket's message on the default link."""
    link, buckets = profile.default_link.name, range(len(profile.buckets))
    return [profile.message_s(Payload(kind, range(b, b + 1)), link, verb) for b in buckets]


def _forward_end_s(compute_s: Sequence[float], gather_s: Sequence[float]) -> float:
    """Return the end of a forward over layers in this order."""
    link_s = start_s = end_s = 0.0
    for compute, gather in zip(compute_s, gather_s, strict=True):
        link_s = max(link_s, start_s) + gather  # issued when the layer before begins
        start_s = max(end_s, link_s)
        end_s = start_s + compute
    return end_s


def _backward_end_s(
    compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float]
) -> float:
    """Return the end of a backward and of its last message, over layers in this order."""
    link_s = gathered_s = gather_s[0]
    end_s, following = 0.0, [*gather_s[1:], None]
    for compute, gather, scatter in zip(compute_s, following, scatter_s, strict=True):
        start_s = max(end_s, gathered_s)
        if gather is not None:
            gathered_s = link_s = max(link_s, start_s) + gather
        end_s = start_s + compute
        link_s = max(link_s, end_s) + scatter
    return max(end_s, link_s)
