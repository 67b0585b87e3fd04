"""Kinds of frames between workers and parameter servers."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Kind of a frame: below 16 from a worker, from 16 on from a server.

    A worker's clock is the number of its next push. "clock" below is the header's field.
    """

    HELLO = 1  # identify a worker; clock: first one without acknowledgement; meta: fresh, layout
    START = 2  # begin to push; clock: that of the next push
    PUSH = 3  # gradients of a shard for a clock; meta: settings, absent
    SKIP = 4  # no gradients of a shard for a clock
    # request all parameters, once every worker's clock is at least `clock`, in place of a waiting
    # request
    PULL = 5
    BEAT = 6  # heartbeat
    STATUS = 7  # request the clocks of all workers
    MEET = 8  # numbers to average over all workers (body); clock: number of this average, from 1
    STATE = 9  # request the optimizer state of a shard
    BYE = 10  # the worker leaves without failure
    WELCOME = 16  # clock: that of the worker's next push; meta: taken, by shard
    TAKEN = 17  # acknowledgement of the push or skip of a shard for a clock
    PARAMETERS = 18  # a shard; clock: lower bound of the clocks of all workers
    CLOCKS = 19  # meta: by rank the clock and the seconds since the last frame
    MET = 20  # averages of the numbers of all workers (body)
    STATE_IS = 21  # optimizer state of a shard; meta: names and forms; body: numbers
    REFUSED = 22  # the server closes the connection; meta: why
