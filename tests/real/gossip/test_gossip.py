"""Workers that gossip over real sockets, in one process."""

from __future__ import annotations

import re
import threading
import time

import networkx as nx
import pytest
import torch
from cases.gossip_jobs import Worker, cut, flats, job, kill, stall, together, until, warm

from offbeat.gossip.exchange import Exchanges
from offbeat.gossip.protocol import Kind
from offbeat.gossip.state import AVERAGING
from offbeat.gossip.view import State

STEP = 2.0**-7  # float32 adds up many of them without a bias


def receive(exchanges: Exchanges, x: torch.Tensor, count: int) -> None:
    """Apply the first chunks of the partner's x."""
    for chunk in range(count):
        exchanges.buffer(chunk)[:] = exchanges.wire.memory([x], chunk)
        exchanges.apply_chunk()


def test_two_workers_end_at_their_mean() -> None:
    x = flats(2, torch.float64)
    mean = (x[0] + x[1]) / 2
    with job(nx.complete_graph(2), x, momentum=False) as workers:
        assert workers[0].clock.unit_s is None
        warm(workers)
        assert workers[0].clock.unit_s == workers[1].clock.unit_s == pytest.approx(1e-3)
        until(lambda: all(worker.count() for worker in workers))
        for worker in workers:
            worker.gossip.pause()
            worker.state.refresh()
        for flat in x:
            torch.testing.assert_close(flat, mean)


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
def test_the_mean_is_that_of_the_gradients(snapshot: bool, momentum: bool) -> None:
    """Four workers on a ring, hundreds of events in no order."""
    x = flats(4)
    start, taken = torch.stack(x).double().mean(0), [0] * 4
    with job(nx.cycle_graph(4), x, snapshot=snapshot, momentum=momentum) as workers:

        def train(n: int) -> None:
            steps = 0
            while steps < 60 or workers[n].count() < 20:
                workers[n].gradient(lambda x: x.add_(STEP), 0.001 * (1 + n % 2))
                steps += 1
            taken[n] = steps
            workers[n].consolidate()

        assert together([lambda n=n: train(n) for n in range(4)]) == [None] * 4
        found = torch.stack(x).double()
        assert (found[0] - (start + STEP * sum(taken) / 4)).abs().max() < 3e-6
        assert all(torch.equal(found[0], one) for one in found)
        counts = [worker.gossip.counts.exchanges for worker in workers]
        for i, j in nx.cycle_graph(4).edges:
            assert counts[i][j] == counts[j][i] > 0


def test_with_half_the_bytes_the_mean_is_kept() -> None:
    x = flats(3)
    start = torch.stack(x).double().mean(0)
    with job(nx.complete_graph(3), x, form="bf16") as workers:
        warm(workers)
        until(lambda: all(worker.count() > 20 for worker in workers))
        together([worker.consolidate for worker in workers])
    assert (x[0].double() - start).abs().max() < 2e-6


def test_a_wrong_secret_is_no_neighbour() -> None:
    x = flats(2)
    with (
        job(
            nx.complete_graph(2),
            x,
            secret=lambda n: b"one another".split()[n],
            connect=False,
            timeout_s=0.5,
        ) as workers,
        pytest.raises(RuntimeError, match="workers 1 to connect"),
    ):
        workers[0].gossip.connect()


def test_another_model_is_no_neighbour() -> None:
    x = flats(2)
    with (
        job(nx.complete_graph(2), x, layout=str, connect=False, timeout_s=0.5) as workers,
        pytest.raises(RuntimeError, match="workers 1 to connect"),
    ):
        workers[0].gossip.connect()


def test_a_worker_that_disappears_is_given_up() -> None:
    """The others go on, and end with the same bits."""
    x = flats(4)
    with job(nx.cycle_graph(4), x, silent_s=1.0) as workers:
        warm(workers)
        until(lambda: all(worker.count() for worker in workers))
        dead, living = workers[3], [workers[n] for n in (0, 1, 2)]
        before = living[0].state.course.last
        kill(dead)
        until(lambda: all(worker.gossip.view.dead_workers() == [3] for worker in living))
        until(lambda: living[1].state.course.last.eta != before.eta)
        words = [word for worker in living for word in worker.gossip.take_notices()]
        assert sum("worker 3 could not be reached" in word for word in words) == 2
        counts = [worker.count() for worker in living]
        until(lambda: all(w.count() > c for w, c in zip(living, counts, strict=True)))
        assert together([worker.consolidate for worker in living]) == [None] * 3
        assert torch.equal(x[0], x[1])
        assert torch.equal(x[0], x[2])
        until(lambda: len({worker.state.course.last for worker in living}) == 1)


def in_long_units(workers: list[Worker]) -> None:
    """Of 10 s, so that nothing is due for minutes."""
    for worker in workers:
        for _ in range(4):
            worker.gossip.record_gradient(10.0)
    until(lambda: all(worker.clock.unit_s == 10.0 for worker in workers))


def test_other_edges_are_agreed_on_at_once() -> None:
    with job(nx.complete_graph(3), flats(3), silent_s=1.0) as workers:
        in_long_units(workers)
        kill(workers.pop())
        until(lambda: all(worker.gossip._agreements.agreed.edges == [(0, 1)] for worker in workers))


def test_who_hears_of_a_report_reports_at_once() -> None:
    with job(nx.complete_graph(2), flats(2)) as workers:
        in_long_units(workers)
        caller, other = workers[1].gossip, workers[0].gossip
        number = other._agreements.agreed.number
        report = {"reports": [(1, number + 1, 10.0, 0)], "held": 0}
        caller._commands.append(lambda: caller._neighbours.on_view(report))
        caller._peers.wake()
        until(lambda: other._agreements.agreed.number == number + 1)


def test_workers_that_disappear_together_are_given_up() -> None:
    x = flats(5)
    with job(nx.complete_graph(5), x, silent_s=1.0) as workers:
        together([lambda n=n: kill(workers[n]) for n in (3, 4)])
        until(lambda: all(worker.gossip.view.dead_workers() == [3, 4] for worker in workers[:3]))
        assert together([worker.consolidate for worker in workers[:3]]) == [None] * 3
        assert torch.equal(x[0], x[2])


def test_a_connection_that_breaks_comes_back() -> None:
    x = flats(2, torch.float64)
    start = x[0] + x[1]
    with job(nx.complete_graph(2), x) as workers:
        warm(workers)
        for _ in range(5):
            count = workers[0].count()
            until(lambda count=count: workers[0].count() > count)
            cut(workers[1])
        until(lambda: workers[0].count() > count + 2)
        assert together([worker.consolidate for worker in workers]) == [None] * 2
        assert not [word for worker in workers for word in worker.gossip.take_notices()]
    torch.testing.assert_close(2 * x[0], start, rtol=0, atol=1e-12)


def test_a_neighbour_that_was_given_up_is_taken_again() -> None:
    """A link that is cut for longer than a worker may be silent: the others hear of both."""
    x = flats(3)
    with job(nx.complete_graph(3), x, silent_s=0.5) as workers:
        warm(workers)
        peers = workers[1].gossip._peers
        peers._tries[0] = 100  # so that it waits for seconds before it connects again
        workers[1].gossip._commands.append(lambda: peers.drop(0))
        peers._retry_at_s[0] = time.monotonic() + 2.5
        peers.wake()
        until(lambda: workers[2].gossip.view.edges() == [(0, 2), (1, 2)])
        until(lambda: set(workers[0].gossip._exchanging.requests.rates) == {2})
        until(
            lambda: all(w.gossip.view.edges(State.UP) == [(0, 1), (0, 2), (1, 2)] for w in workers)
        )
        until(lambda: set(workers[0].gossip._exchanging.requests.rates) == {1, 2})
        until(lambda: len({worker.state.course.last for worker in workers}) == 1)
        assert any("can be reached again" in word for word in workers[0].gossip.take_notices())
        assert together([worker.consolidate for worker in workers]) == [None] * 3
        assert torch.equal(x[0], x[1])


@pytest.mark.parametrize("on_partition", ["raise", "continue"])
def test_a_graph_that_falls_apart(on_partition: str) -> None:
    x = flats(5)
    chain = nx.path_graph(5)
    with job(chain, x, silent_s=1.0, on_partition=on_partition) as workers:
        kill(workers[3])
        if on_partition == "raise":
            for worker in (*workers[:3], workers[4]):
                until(lambda worker=worker: worker.gossip._error is not None)
            with pytest.raises(RuntimeError, match=re.escape("(0, 1, 2) and (3, 4)")):
                workers[0].gossip.check()
            return
        until(lambda: workers[4].gossip._error is not None)
        assert together([worker.consolidate for worker in workers[:3]]) == [None] * 3
        assert torch.equal(x[0], x[2])


def test_who_says_goodbye_is_not_mourned() -> None:
    x = flats(3)
    with job(nx.path_graph(3), x) as workers:
        warm(workers)
        workers[1].gossip.close()
        until(lambda: workers[0].gossip.view.has_leavers() and workers[2].gossip.view.has_leavers())
        for worker in (workers[0], workers[2]):
            worker.gossip.check()
            worker.consolidate()  # alone
            assert worker.gossip.take_notices() == []


def test_a_neighbour_that_comes_again_hears_everything() -> None:
    """What changed while it was away; and that meetings begin anew, although it may know already
    that its edge is back: what was sent to it before is lost."""
    with job(nx.complete_graph(3), flats(3)) as workers:
        gossip, sent, done = workers[0].gossip, [], threading.Event()

        hello = {**workers[1].gossip._neighbours.hello(0), "known": [(0, 1, 4, int(State.UP), 0.0)]}

        def come() -> None:
            gossip.view.merge([(1, 2, 8, int(State.DOWN), 0.0)])
            gossip._peers.send = lambda to, kind, **about: sent.append((to, kind, about))
            gossip._neighbours.on_connect(1, hello)
            del gossip._peers.send
            done.set()

        gossip._commands.append(come)
        gossip._peers.wake()
        assert done.wait(5.0)
        told = [about["meta"]["known"] for to, kind, about in sent if (to, kind) == (1, Kind.VIEW)]
        assert [(*edge, version) for known in told for *edge, version, _, _ in known] == [
            (1, 2, 8),
            (0, 1, 4),
            (0, 1, 5),
        ]


def test_old_news_of_an_edge_do_not_hide_that_it_is_broken() -> None:
    with job(nx.complete_graph(3), flats(3), silent_s=1.0) as workers:
        workers[1].gossip._peers._addresses[0] = ("127.0.0.1", 1)  # where nobody is
        cut(workers[1])
        gossip = workers[0].gossip
        until(lambda: gossip.view.state(1) is State.DOWN)
        news = {"known": [(0, 1, 50, int(State.UP), 0.0)], "held": 0}
        gossip._commands.append(lambda: gossip._neighbours.on_view(news))
        gossip._peers.wake()
        for worker in (workers[0], workers[2]):
            until(lambda worker=worker: worker.gossip.view.edges() == [(0, 2), (1, 2)])


def test_who_has_come_and_left_was_there() -> None:
    """A worker that trains for less time than another one needs to look up."""
    x = flats(2)
    with job(nx.complete_graph(2), x, connect=False, timeout_s=0.5) as workers:
        workers[1].gossip.connect()
        workers[1].gossip.close()
        until(workers[0].gossip.view.has_leavers)
        workers[0].gossip.connect()


def test_what_is_in_doubt_with_the_dead_is_kept() -> None:
    """Nobody can say whether the dead one had all; its partner has."""
    x = flats(3, torch.float64)
    with job(nx.complete_graph(3), x, silent_s=1.0) as workers:
        kill(workers.pop())
        until(lambda: all(worker.gossip.view.dead_workers() == [2] for worker in workers))
        sent = [flat.clone() for flat in x]
        exchanges = workers[0].gossip._exchanging.exchanges
        exchanges.begin(2, 7, 0.0, AVERAGING)
        receive(exchanges, sent[2], len(exchanges.wire.chunks))
        assert exchanges.abort(2)
        assert together([worker.consolidate for worker in workers]) == [None] * 2
    kept = ((sent[0] + sent[2]) / 2 + sent[1]) / 2
    torch.testing.assert_close(x[0], kept, rtol=0, atol=1e-12)


@pytest.mark.parametrize("there", [True, False])
def test_what_is_in_doubt_when_an_edge_is_given_up(there: bool) -> None:
    """Both ends live: the partner says what it has, over others. So the mean is kept."""
    x = flats(3, torch.float64)
    start = torch.stack(x).mean(0)
    with job(nx.complete_graph(3), x, silent_s=1.0) as workers:
        peers = workers[1].gossip._peers
        peers._addresses[0] = ("127.0.0.1", 1)  # where nobody is
        cut(workers[1])
        until(lambda: workers[2].gossip.view.edges() == [(0, 2), (1, 2)])
        sent = [flat.clone() for flat in x]
        for me, whole in (0, True), (1, there):
            exchanges = workers[me].gossip._exchanging.exchanges
            one = exchanges.begin(1 - me, 7, 0.0, AVERAGING)
            exchanges.note_sent(one, 2)
            receive(exchanges, sent[1 - me], len(exchanges.wire.chunks) if whole else 2)
            assert exchanges.abort(1 - me)
            assert exchanges.partners_in_doubt() == ([1 - me] if whole else [])
        assert together([worker.consolidate for worker in workers]) == [None] * 3
        assert [worker.gossip._exchanging.exchanges.partners_in_doubt() for worker in workers] == [
            []
        ] * 3
    for flat in x:
        torch.testing.assert_close(flat, start, rtol=0, atol=1e-12)


def test_one_result_although_workers_leave_or_die_meanwhile() -> None:
    """Those that have the result tell it; a new tree does not make another one."""
    for seed in range(6):
        x = flats(5)
        with job(nx.wheel_graph(5), x, silent_s=1.0) as workers:

            def end(n: int, workers: list = workers, seed: int = seed) -> None:
                if n == 4 and seed % 2:
                    kill(workers[n])
                else:
                    workers[n].consolidate()
                    workers[n].gossip.close()

            assert together([lambda n=n: end(n) for n in range(5)]) == [None] * 5
        assert all(torch.equal(x[0], one) for one in x[1 : 5 - seed % 2])


@pytest.mark.parametrize(("stalled", "meeting"), [(0, 0), (3, 1), (0, 2)])  # the root, or a leaf
def test_who_is_thought_dead_in_a_consolidation_must_join_again(stalled: int, meeting: int) -> None:
    """The others do not wait for it, and have the same bits."""
    x = flats(4)
    with job(nx.complete_graph(4), x, silent_s=0.25) as workers:

        def wait(n: int) -> None:
            if n == meeting:
                stall(workers[stalled], 1.5)

        acts = [worker.consolidate for worker in workers]
        acts[stalled] = lambda: workers[stalled].consolidate(wait)
        raised = together(acts)
        assert isinstance(raised.pop(stalled), RuntimeError)
        assert raised == [None] * 3
        others = [flat for n, flat in enumerate(x) if n != stalled]
        assert all(torch.equal(others[0], one) for one in others)


def test_who_is_away_for_one_reduction_takes_its_result() -> None:
    """It has the means already, and the others compare them without it."""
    x = flats(4)
    with job(nx.complete_graph(4), x, silent_s=0.25) as workers:
        acts = [worker.consolidate for worker in workers]
        acts[3] = lambda: workers[3].consolidate(lambda n: n == 3 and stall(workers[3], 1.0))
        assert together(acts) == [None] * 4
        assert all(torch.equal(x[0], one) for one in x)


def test_who_makes_a_result_when_the_others_have_another_must_join_again() -> None:
    """The root has everybody's numbers, and stands still. So the others make a result without it;
    when it comes back it makes its own."""
    x = flats(4)
    with job(nx.complete_graph(4), x, silent_s=0.5) as workers:
        root = workers[0].gossip

        def wait(n: int) -> None:
            if n == 2:
                until(lambda: {peer for peer, _ in root._reductions._early_frames} == {1, 2, 3})
                stall(workers[0], 2.0)

        acts = [worker.consolidate for worker in workers]
        acts[0] = lambda: workers[0].consolidate(wait)
        raised = together(acts)
        assert isinstance(raised[0], RuntimeError)
        assert raised[1:] == [None] * 3
        assert all(torch.equal(x[1], one) for one in x[2:])


def test_several_results_become_one() -> None:
    x = flats(4)
    theirs = [x[0], x[0], x[2], x[3]]
    with job(nx.cycle_graph(4), x) as workers:
        alike: list[torch.Tensor] = [x[0]] * 4

        def end(n: int) -> None:
            (alike[n],) = workers[n].gossip.agree_on_means([theirs[n]])

        assert together([lambda n=n: end(n) for n in range(4)]) == [None] * 4
    assert all(torch.equal(alike[0], one) for one in alike)
    torch.testing.assert_close(alike[0], torch.stack(theirs).mean(0))


def test_who_was_out_of_reach_for_a_whole_consolidation_must_join_again() -> None:
    x = flats(4)
    with job(nx.complete_graph(4), x, silent_s=0.25) as workers:
        stall(workers[3], 2.0)
        assert together([worker.consolidate for worker in workers[:3]]) == [None] * 3
        until(lambda: workers[3].gossip._error is not None)
        assert isinstance(workers[3].gossip._error, RuntimeError)
        assert all(torch.equal(x[0], one) for one in x[1:3])


def test_who_is_thought_dead_until_all_have_left_is_told_so() -> None:
    with job(nx.complete_graph(3), flats(3), silent_s=0.25) as workers:

        def wait(n: int) -> None:
            if n == 1:
                stall(workers[2], 1.5)

        def end(n: int) -> None:
            workers[n].consolidate()
            workers[n].gossip.close()

        raised = together([lambda: end(0), lambda: end(1), lambda: workers[2].consolidate(wait)])
        assert raised[:2] == [None] * 2
        assert isinstance(raised[2], RuntimeError)


def test_a_meeting_says_who_is_waited_for() -> None:
    words = "waited 0.3 s for all workers to meet: nothing from 1,"
    with (
        job(nx.path_graph(3), flats(3), timeout_s=0.3) as workers,
        pytest.raises(RuntimeError, match=words),
    ):
        workers[0].gossip.all_reduce([torch.zeros(1)])


def test_the_unit_follows_when_it_drifts() -> None:
    x = flats(2)
    with job(nx.complete_graph(2), x) as workers:
        warm(workers)
        for worker in workers:
            for _ in range(60):
                worker.gossip.record_gradient(0.01)
        until(lambda: all((w.clock.unit_s or 0) > 0.005 for w in workers))
        assert workers[0].clock.unit_s == workers[1].clock.unit_s
