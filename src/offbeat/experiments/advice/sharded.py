"""Iterations of ZeRO-3 and HSDP across machines, by equations.

ZeRO-3 (`fully_shard` over all M ranks) gathers the parameters of a layer before its forward and
once more before its backward, and scatters its gradients afterwards: 3 (M - 1) / M of the model's
bytes per iteration, where DDP has 2 (M - 1) / M. Each rank updates its own shard: update_s / M.
HSDP shards inside a machine and all-reduces between the machines. Each rank sends its shard, and
all shards of a machine share its network, so a layer costs an all-reduce of the whole layer.
Messages inside a machine count as free.

On CPUs an iteration takes compute and all messages, one after the other: FSDP issues messages on
streams of the device, and without streams each of them blocks the compute that issues it. gloo's
reduce-scatter sends as much as an all-reduce.

On GPUs with NCCL (`Profile.device`) ZeRO-3 hides messages as far as its order of issue allows. For
layers 1 to L in the order of the forward, with f_l and b_l the seconds of forward and backward, a_l
of the gather and r_l of the reduce-scatter:

    forward:   G_l = max(G_(l-1), S_(l-1)) + a_l        the gather of layer l ends
               S_l = max(S_(l-1) + f_(l-1), G_l)        its forward begins
    backward:  the same over l = L .. 1 with b_l, and
               R_l = max(R_(l+1), S_l + b_l, ...) + r_l the reduce-scatter of layer l ends

A gather is issued when the compute of the layer before it begins, so the gather for layer l - 1,
which is issued at S_l, precedes the reduce-scatter of layer l, which is issued at S_l + b_l. The
iteration ends after the last reduce-scatter. HSDP all-reduces each layer after its backward.

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
        iteration_s: seconds, with messages hidden as far as devices and the order of issue allow.
        bound_s: seconds if all messages were hidden that fit under compute; on CPUs `unhidden_s`.
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
    slowest, on_cpus = profile.slowest(), _is_on_cpus(profile)
    gather_s = _message_s(slowest, "param", "all_gather")
    scatter_s = _message_s(slowest, "grad", "all_reduce" if on_cpus else "reduce_scatter")
    forward_s = [b.forward_s for b in slowest.buckets]
    backward_s = [b.backward_s for b in slowest.buckets]
    local_s = slowest.other_s + slowest.update_s / profile.world_size
    hidden_s = _forward_end_s(forward_s[::-1], gather_s[::-1])
    hidden_s += _backward_end_s(backward_s, gather_s, scatter_s)
    sizes = [profile.payload_bytes(kind, range(len(gather_s))) for kind in ("param", "grad")]
    return _iteration(
        profile,
        hidden_s=local_s + hidden_s,
        compute_s=local_s + sum(forward_s) + sum(backward_s),
        messages_s=2 * sum(gather_s) + sum(scatter_s),
        sent_bytes=sizes[0] + sizes[1] * (1.0 if on_cpus else 0.5),
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
    return _iteration(
        profile,
        hidden_s=local_s + max(slowest.backward_s, sent_s),
        compute_s=local_s + slowest.backward_s,
        messages_s=sum(message_s),
        sent_bytes=profile.payload_bytes("grad", range(len(message_s))),
    )


def _is_on_cpus(profile: Profile) -> bool:
    return profile.device == "cpu"


def _iteration(
    profile: Profile, hidden_s: float, compute_s: float, messages_s: float, sent_bytes: float
) -> ShardedIteration:
    unhidden_s = compute_s + messages_s
    if _is_on_cpus(profile):
        return ShardedIteration(unhidden_s, unhidden_s, unhidden_s, sent_bytes)
    return ShardedIteration(hidden_s, max(compute_s, messages_s), unhidden_s, sent_bytes)


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
