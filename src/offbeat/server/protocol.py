"""What workers and servers say to each other."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What a frame says; below 16 a worker does."""

    HELLO = 1  # I am this rank; meta: fresh, layout. clock: the first that is not acknowledged
    START = 2  # I go on from this clock
    PUSH = 3  # gradients of a shard for a clock; meta: settings, absent
    SKIP = 4  # no gradients of a shard for a clock
    PULL = 5  # all parameters, once every clock is at least this one
    BEAT = 6  # I am alive
    STATUS = 7  # who is where?
    MEET = 8  # wait here for the others; clock: this worker's how many-th; body: numbers to average
    STATE = 9  # a shard's optimizer state
    BYE = 10  # I have done my part
    HURRY = 11  # answer the pull that waits, as things are
    WELCOME = 16  # go on from this clock; meta: taken, of every shard
    TAKEN = 17  # the shard's gradients of that clock are in
    PARAMETERS = 18  # a shard; clock: every clock is at least this one
    CLOCKS = 19  # meta: clock and seconds since last heard, by rank
    MET = 20  # everybody is here; body: the means
    STATE_IS = 21  # meta: names and forms; body: numbers
    REFUSED = 22  # meta: why
