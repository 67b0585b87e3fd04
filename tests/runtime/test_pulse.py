"""Who it was: what ranks conclude from each other's signs of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from offbeat.transport import pulse, rendezvous
from offbeat.transport.pulse import FAILED, GAVE_UP, LEFT, RUNS, TOLD, WAITS, Heard, Pulse

RANKS = 4


class Store:
    """A store in memory that can stop answering, or go."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}
        self.gone = False
        self.answers = threading.Event()
        self.answers.set()

    def _ask(self) -> None:
        self.answers.wait()
        if self.gone:
            raise RuntimeError("Broken pipe")

    def set(self, key: str, value: str) -> None:
        self._ask()
        self.said[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self.said for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._ask()
        return [self.said[key] for key in keys]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, list[Pulse]]]:
    """Four ranks that have heard of each other; rank 3 looks at the others."""
    for name, seconds in {"BEAT_S": 0.02, "SILENT_S": 0.3, "ANSWERS_S": 0.1}.items():
        monkeypatch.setattr(pulse, name, seconds)
    monkeypatch.setattr(pulse, "MOST_PER_S", 1e9)
    store = Store()
    pulses = [Pulse(store, rank, RANKS) for rank in range(RANKS)]
    for one in pulses:
        one.enter()
    until(lambda: all(heard.beat > 0 for one in pulses for heard in one.heard))
    yield store, pulses
    store.gone = True
    store.answers.set()
    for one in pulses:
        one.end()


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def dies(one: Pulse) -> None:
    one._ended.set()


def test_what_is_new_in_a_sign() -> None:
    """A sign that is there still is none; who does the same in another iteration goes on."""
    heard = Heard()
    found = []
    for now_s, beat, iteration in [(1.0, 1, 5), (2.0, 2, 6), (3.0, 3, 6), (4.0, 3, 6)]:
        heard.take(now_s, beat, iteration, RUNS, "in forward", [])
        found.append((heard.iteration, heard.beat_s, heard.since_s))
    assert found == [(5, 1.0, 1.0), (6, 2.0, 2.0), (6, 3.0, 2.0), (6, 3.0, 2.0)]


def test_all_alive_and_waiting(ranks: tuple[Store, list[Pulse]]) -> None:
    _, pulses = ranks
    for one in pulses:
        one.state = WAITS
    time.sleep(0.5)
    assert pulses[3].culprits(waited_s=0.5) == []
    assert not pulses[3].over


def test_who_died(ranks: tuple[Store, list[Pulse]]) -> None:
    _, pulses = ranks
    pulses[1].iteration, pulses[1].words = 7, "in forward"
    until(lambda: pulses[3].heard[1].iteration == 7)
    dies(pulses[1])
    pulses[3].wait()
    assert pulses[3].culprits(waited_s=0.0) == [1]
    assert pulses[3].why(1).endswith("last heard: iteration 7, in forward")


def test_who_hangs_is_named_and_not_who_waits_for_it(ranks: tuple[Store, list[Pulse]]) -> None:
    _, pulses = ranks
    pulses[0].state = pulses[1].state = pulses[3].state = WAITS
    time.sleep(0.5)
    assert pulses[3].culprits(waited_s=0.6) == [2]
    assert "keeps the others waiting: in its script" in pulses[3].why(2)
    assert pulses[3].culprits(waited_s=60.0) == []  # it has not been long enough


def test_whose_own_mistake_it_was(ranks: tuple[Store, list[Pulse]]) -> None:
    _, pulses = ranks
    pulses[0].say(FAILED, "failed with KeyError: 'x'")
    pulses[0].end()  # its last sign stays
    until(lambda: pulses[3].over)
    assert pulses[3].culprits(waited_s=0.0) == [0]
    assert pulses[3].why(0) == "failed with KeyError: 'x'"


def test_who_gave_up_is_not_the_cause(ranks: tuple[Store, list[Pulse]]) -> None:
    _, pulses = ranks
    pulses[0].say(GAVE_UP, "gave up in backward")
    dies(pulses[0])
    dies(pulses[2])
    pulses[3].wait()
    assert pulses[3].over
    assert not pulses[0].over  # for its own part
    assert pulses[3].culprits(waited_s=0.0) == [2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), {FAILED}),
        (RuntimeError("shapes do not match"), {FAILED}),
        (RuntimeError("Connection closed by peer"), {GAVE_UP, TOLD}),
    ],
)
def test_a_broken_connection_is_a_consequence(
    ranks: tuple[Store, list[Pulse]],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: set[str],
) -> None:
    """Of a process that ends with an exception: only a failure of its own is the cause."""
    _, pulses = ranks
    mine, say, found = pulses[0], pulses[0].say, set[str]()
    monkeypatch.setattr(mine, "say", lambda state, *rest: (found.add(state), say(state, *rest)))
    monkeypatch.setattr(pulse, "_pulses", [(None, mine)])
    monkeypatch.setattr(pulse, "_hook", lambda *_: None)
    pulse._failing(type(error), error, None)
    assert found == said
    until(lambda: pulses[3].over)
    assert (0 in pulses[3].culprits(waited_s=0.0)) == (FAILED in said)


def test_who_has_left(ranks: tuple[Store, list[Pulse]]) -> None:
    _, pulses = ranks
    pulses[1].iteration = 5
    pulses[1].exit()
    until(lambda: pulses[3].heard[1].state == LEFT)
    time.sleep(0.5)
    assert pulses[3].culprits(waited_s=0.1) == [1]
    assert pulses[3].why(1) == "has left after iteration 5"
    pulses[2].say(FAILED, "failed")  # after that nobody heard of rank 1, and need not
    until(lambda: pulses[3].over)
    assert pulses[3].culprits(waited_s=0.1) == [2]
    pulses[2].say(RUNS, "in its script")
    pulses[1].enter()  # for another model
    time.sleep(0.1)
    assert pulses[3].heard[1].state == LEFT  # as far as the one before goes
    pulses[3].exit()
    pulses[3].enter()
    until(lambda: pulses[3].heard[1].state == RUNS)
    assert pulses[3].culprits(waited_s=60.0) == []
    for rank in (1, 3):
        pulses[rank].enter()  # for one more
    pulses[1].exit()  # from one of two
    beat = pulses[3].heard[1].beat
    until(lambda: pulses[3].heard[1].beat > beat + 1)
    assert pulses[3].heard[1].state == RUNS


def test_who_failed_and_has_begun_anew(ranks: tuple[Store, list[Pulse]]) -> None:
    """Whoever still waits for it learns that; who has begun anew, too, no longer counts it."""
    _, pulses = ranks
    pulses[1].say(TOLD, "gave up", blames=[2])
    pulses[2].exit("failed with ValueError: x")
    pulses[1].exit()
    for rank in (1, 2):
        pulses[rank].enter()
    until(lambda: pulses[3].heard[2].state == FAILED)
    assert pulses[3].over
    assert pulses[3].culprits(waited_s=0.0) == [2]
    assert pulses[3].why(2) == "failed with ValueError: x"
    pulses[3].exit()
    pulses[3].enter()
    until(lambda: {pulses[3].heard[rank].state for rank in (1, 2)} == {RUNS})
    assert not pulses[3].over
    assert pulses[3].culprits(waited_s=0.0) == []


def test_how_a_rank_did_before_does_not_count_for_who_has_begun_anew(
    ranks: tuple[Store, list[Pulse]],
) -> None:
    """Nothing is known yet of one that has not come as far."""
    _, pulses = ranks
    pulses[1].say(GAVE_UP, "gave up in backward")
    until(lambda: pulses[3].over)
    pulses[3].enter()
    until(lambda: not pulses[3].over)
    assert str(pulses[3].heard[1]) == pulse.SCRIPT
    pulses[1].enter()
    pulses[1].words = "in forward"
    until(lambda: pulses[3].heard[1].words == "in forward")
    for one in (pulses[1], pulses[3]):
        one.exit()


def test_what_others_have_found_counts(ranks: tuple[Store, list[Pulse]]) -> None:
    """Rank 0 saw it first, and leaves with the store."""
    store, pulses = ranks
    dies(pulses[2])
    pulses[0].say(TOLD, "gave up", blames=[2])
    until(lambda: pulses[3].heard[0].state == TOLD)
    assert pulses[3].over
    pulses[2].say(RUNS, "in its script")  # it has been asleep only
    assert pulses[2].culprits(waited_s=60.0) == []
    store.gone = True
    until(lambda: pulses[3].lost_s is not None)
    assert pulses[3].culprits(waited_s=0.0) == [2]


def test_the_store_goes_with_rank_0(ranks: tuple[Store, list[Pulse]]) -> None:
    store, pulses = ranks
    store.gone = True
    until(lambda: pulses[3].lost_s is not None)
    time.sleep(0.5)  # nobody is heard any more, and only rank 0 is to blame
    assert pulses[3].culprits(waited_s=0.0) == [0]
    assert pulses[0].culprits(waited_s=0.0) == []  # not itself


def test_since_when_the_store_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since it was asked and did not answer; one that has answered is not lost."""
    monkeypatch.setattr(pulse, "ANSWERS_S", -1)
    answers, lost = Pulse(Store(), 0, 1), Pulse(Store(), 0, 1)
    answers._beat()
    assert answers.lost_s is None
    asked_s = []

    def fails(*_: str) -> None:
        asked_s.append(time.monotonic())
        raise RuntimeError("Connection reset by peer")

    lost._store.set = fails
    lost._beat()
    assert lost.lost_s is not None
    assert lost.lost_s <= asked_s[0]


def test_a_store_that_answers_no_more(ranks: tuple[Store, list[Pulse]]) -> None:
    store, pulses = ranks
    store.answers.clear()
    time.sleep(0.5)
    begun_s = time.monotonic()
    pulses[3].say(GAVE_UP, "gave up")
    assert time.monotonic() - begun_s < 1
    assert pulses[3].culprits(waited_s=0.0) == [0]


def test_whose_store_it_is_stays(
    ranks: tuple[Store, list[Pulse]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the others have told, or have died."""
    _, pulses = ranks
    dies(pulses[1])
    pulses[2].say(LEFT, "has left")
    pulses[3].say(GAVE_UP, "gave up")  # and has yet to read and tell
    told = threading.Timer(0.5, pulses[3].say, (TOLD, "gave up"))
    told.start()
    begun_s = time.monotonic()
    pulses[0].stay(10)
    assert 0.4 < time.monotonic() - begun_s < 5
    pulses[3].state = RUNS
    begun_s = time.monotonic()
    pulses[1].stay(10)  # it is not its store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    pulses[0].stay(10)
    assert time.monotonic() - begun_s < 0.3


def test_one_pulse_of_a_process_for_the_group_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_pulses", [])
    monkeypatch.setattr(pulse, "_report_ends", lambda: None)
    store, other = HashStore(), HashStore()
    first = pulse.pulse_of(store, 0, 1)
    assert pulse.pulse_of(store, 0, 1) is first
    assert pulse.pulse_of(other, 0, 1) is not first


# ---- restarts -------------------------------------------------------------------------------


def meet(store: HashStore, attempt: str, ranks: int = 3) -> list[str]:
    """What every rank leaves and finds in its part of the store."""
    found: list[str] = []

    def come(rank: int) -> None:
        part = rendezvous.fresh(store, rank, ranks, timeout_s=10)
        assert not part.check([f"said/{rank}"])  # nobody was here before
        part.set(f"said/{rank}", attempt)
        until(lambda: part.check([f"said/{r}" for r in range(ranks)]))
        found.extend(part.get(f"said/{r}").decode() for r in range(ranks))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_every_attempt_has_a_part_of_the_store_of_its_own() -> None:
    store = HashStore()
    assert meet(store, "first") == ["first"] * 9
    store.set("offbeat/here/1", "of one that has died since")
    assert meet(store, "second") == ["second"] * 9


def test_the_last_moment_is_not_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.secrets, "token_hex", lambda _: "drawn")
    store = HashStore()
    store.set("offbeat/in/drawn/1", "")
    rendezvous.fresh(store, 0, 2, timeout_s=-1)


def test_a_store_may_be_stale_where_this_host_has_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Agents count for themselves."""
    monkeypatch.setenv(rendezvous.RESTARTS_VARIABLE, "0")
    assert rendezvous.may_be_stale()
    monkeypatch.delenv(rendezvous.RESTARTS_VARIABLE)
    assert not rendezvous.may_be_stale()


@pytest.mark.parametrize(("rank", "words"), [(0, "rank 1, 2 have not"), (1, "rank 0 has not")])
def test_who_does_not_come_is_named(rank: int, words: str) -> None:
    with pytest.raises(TimeoutError, match=words):
        rendezvous.fresh(HashStore(), rank, 3, timeout_s=0.2)
