"""Accelerators without a GPU: stand-ins for events, streams and devices show what a GPU would."""

from __future__ import annotations

import ast
import io
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import checkpoint_jobs as jobs
from cases import gpu_jobs
from cases.models import Case, batch, build_model, build_optimizer, loss_of
from cases.stub_devices import Launches, OpaqueMarks, StubStream, stub_cuda
from harness.ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d

import offbeat
from offbeat.core.buckets.flat import with_own_storage
from offbeat.core.observers import Observer
from offbeat.core.runtime import position, waiting
from offbeat.core.runtime.actions import Votes
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.prepared import Optimizer
from offbeat.core.runtime.recording import Recorder
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.start import connecting
from offbeat.core.strategy.parsing import parse
from offbeat.core.transport import collectives as collectives_module
from offbeat.core.transport import packed
from offbeat.core.transport.cluster import Cluster as JobCluster
from offbeat.core.transport.collectives import Collectives, collectives
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import CPU, CUDA
from offbeat.core.transport.interfaces import (
    NCCL_DUMPS,
    NCCL_ERRORS,
    LinkSpec,
    group_environment,
    require_one_order,
)
from offbeat.core.transport.link import LinkThread, Message
from offbeat.elastic.changes import MemberChanges
from offbeat.experiments.record.run_directory import load_rank
from offbeat.gossip.chunks import Wire
from offbeat.gossip.startup import GossipSetup
from offbeat.gossip.state import AVERAGING, State
from offbeat.jobs import startup
from offbeat.jobs.iteration_log import IterationLog
from offbeat.jobs.record_lines import LineWriter, rank_file
from offbeat.lab import Cluster, Lab, NoLab
from offbeat.lab.launch import rank_environment
from offbeat.plan import Moment, Phases, Vote, transfer, vote_channel
from offbeat.server.session import SSPSession

GPU = torch.device("cuda", 1)
TRANSFER = transfer(
    "grad", range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
)
DAY_S = 86_400.0
FACTORIES = {f"torch.{name}" for name in ("arange", "empty", "full", "ones", "tensor", "zeros")}


# ---- events ---------------------------------------------------------------------------------


def test_times_of_events_are_exact_after_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event counts float32 milliseconds since another one: 64 ms apart after 6 days."""
    cuda = stub_cuda(monkeypatch)
    device = CUDA(GPU)
    for days in (0.0, 1.0, 6.0, 60.0):
        cuda.now_s = days * DAY_S
        marks = []
        for _ in range(50):
            cuda.now_s += 0.0123
            marks.append((device.mark(), cuda.now_s))
        assert max(abs(device.seconds(mark) - at_s) for mark, at_s in marks) < 1e-6


def test_threads_that_wait_for_events_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch)
    assert CUDA(GPU).mark().event.blocking


def test_threads_of_links_use_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins with device 0, which would get a context of every process."""
    cuda = stub_cuda(monkeypatch)
    link = LinkThread("net", Collectives({"all_reduce": lambda _: None}, _no_send), CUDA(GPU))
    message = link.enqueue(TRANSFER, 0)
    link.release(message, (torch.ones(2),))
    assert message.wait(10.0)
    assert message.error is None
    assert link.close()
    assert [*cuda.current_of.values()] == [GPU]
    assert threading.get_ident() not in cuda.current_of


def _no_send(*_: Any) -> None:
    raise AssertionError


# ---- messages that the device has not completed -----------------------------------------------


class _Control(SimpleNamespace):
    rank, needs_abort = 0, False

    def waiting(self, _: object) -> Any:
        return nullcontext()

    def report_failure(self, waited_s: float) -> str:
        return f"waited {waited_s:.1f} s."


def test_messages_arrive_when_the_device_has_completed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL returns while its kernel waits for a rank that has stopped. The wait has a timeout, and
    the error does not wait for the kernel."""
    cuda = stub_cuda(monkeypatch)
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.01)
    used: list[StubStream] = []

    def issue(_: Tensor) -> None:
        used.append(cuda.current_stream())
        used[0].reached.clear()

    device = CUDA(GPU)
    link = LinkThread("net", Collectives({"all_reduce": issue}, _no_send), device)
    message = link.enqueue(TRANSFER, 0)
    link.release(message, (torch.ones(2),))
    flat: Any = SimpleNamespace(buckets=[SimpleNamespace(name="w")])
    waits = Waiting(device, _Control(), 0.05, Observer(), lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"has not arrived in 0\.05 s"):
        waits.wait(message, flat)
    cuda.default.reached.clear()  # compute is behind the kernel
    lost = Message(TRANSFER, 0, 1, released=device.mark())
    lost.arrive(RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="s after its release: lost"):
        waits.wait(lost, flat)
    used[0].reached.set()
    assert message.wait(10.0)
    assert link.close()


def test_a_silent_rank_has_failed_where_messages_never_do() -> None:
    """A message of NCCL to a killed rank does not fail; the rank's heartbeats stop."""
    control = Control.__new__(Control)
    control._heartbeat = SimpleNamespace(  # type: ignore[assignment]
        detector=SimpleNamespace(needs_abort=False, dead_peers=lambda: [1])
    )
    assert not control.needs_abort
    control.fails_on_silence = True
    assert control.needs_abort


@pytest.mark.parametrize("name", [NCCL_ERRORS, NCCL_DUMPS])
def test_survivors_of_nccl_live_to_report(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch's watchdog would end them, and its dump would delay the end of the script."""
    monkeypatch.delenv(name, raising=False)
    with group_environment(LinkSpec("nccl", None, "nccl")):
        assert os.environ[name] == "0"
    assert name not in os.environ
    with group_environment(LinkSpec("eth0", "eth0", "gloo")):
        assert name not in os.environ
    monkeypatch.setenv(name, "1")
    with group_environment(LinkSpec("nccl", None, "nccl")):
        assert os.environ[name] == "1", "the user's choice"


# ---- messages through the host ----------------------------------------------------------------


class _Memory:
    """A tensor that records the copies into it."""

    dtype, shape, data = torch.float32, (2, 2), property(lambda self: self)

    def __init__(self, name: str, log: list[str], *, is_cuda: bool) -> None:
        self.name, self._log, self.is_cuda, self.device = name, log, is_cuda, GPU

    def numel(self) -> int:
        return 4

    def view(self, _: object) -> _Memory:
        return self

    def copy_(self, other: _Memory, non_blocking: bool) -> None:
        self._log.append(f"{self.name} = {other.name}")


@pytest.mark.parametrize(
    ("rank", "steps"),
    [(0, ["host = tensor", "wait", "send host"]), (1, ["wait", "send host", "tensor = host"])],
)
def test_a_send_changes_the_receivers_tensor_only(
    rank: int, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the sender nothing follows a copy back, so it would write to memory that has a new
    owner."""
    log: list[str] = []
    host = _Memory("host", log, is_cuda=False)
    stub = SimpleNamespace(
        get_rank=lambda: rank,
        get_global_rank=lambda *_: 0,
        get_process_group_ranks=lambda _: [0, 1],
        ReduceOp=torch.distributed.ReduceOp,
    )
    monkeypatch.setattr(collectives_module, "dist", stub)
    monkeypatch.setattr(collectives_module.Scratch, "reserve", lambda *_: host)
    stream = SimpleNamespace(synchronize=lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(
        collectives_module, "sending", lambda *_: lambda x, *_: log.append(f"send {x.name}")
    )
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    act = collectives(group, "gloo", GPU, 1.0)
    act.send(_Memory("tensor", log, is_cuda=True), 0, 1)  # type: ignore[arg-type]
    assert log == steps


# ---- marks and host times ---------------------------------------------------------------------


def train_at_a_pace(strategy: str, folder: str, servers: bool) -> dict[str, Any]:
    """Measure in turns, then train at a pace, on a device whose marks are no numbers."""
    connecting.device_of = lambda _: OpaqueMarks()
    job = {"schema": 1, "pace": 2.0, "turns": f"{folder}/turns", "record_dir": folder}
    path = Path(folder, f"job{os.environ['RANK']}.json")
    path.write_text(json.dumps(job))
    os.environ["OFFBEAT_JOB"] = str(path)
    if servers:
        os.environ["OFFBEAT_SERVERS"] = "1"
    case = Case("mlp", "nesterov", "none", torch.float32)
    model = build_model(case)
    try:
        model, optimizer = offbeat.prepare(
            model, build_optimizer(case, model), strategy, observe=2, timeout_s=20.0
        )
    except SystemExit:
        return {}
    for t in range(5):
        optimizer.zero_grad()
        loss_of(model, *batch(case, 0, t)).backward()
        optimizer.step()
    session = model._session
    model.close()
    return {"profile": getattr(session, "profile", None), "iterations": session.iteration}


@pytest.mark.parametrize(("strategy", "servers"), [("wfbp", False), ("ssp:s=0", True)])
def test_marks_are_no_host_times(strategy: str, servers: bool, tmp_path: Path) -> None:
    """A mark is an event on a GPU, with which neither pace nor turns nor sessions can compute."""
    found = run_ranks(1 + servers, train_at_a_pace, strategy, str(tmp_path), servers)[0]
    assert found["iterations"] == 5
    if not servers:
        assert found["profile"].pace == 2.0
        assert found["profile"].other_s < 1.0


# ---- the device of a tensor -------------------------------------------------------------------


class _OnGPU(Tensor):
    """A host tensor that passes for one of a GPU, which DLPack exports only if it is current."""

    current: Any = None
    device, is_cuda = GPU, True  # type: ignore[assignment]

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.current != GPU:
            raise BufferError("Can't export tensors on a different CUDA device index")
        return super().as_subclass(Tensor).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return super().as_subclass(Tensor).__dlpack_device__()


def test_tensors_of_any_gpu_get_a_storage_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            _OnGPU.current = self.device

        def __exit__(self, *_: object) -> None:
            _OnGPU.current = None

    monkeypatch.setattr(torch.cuda, "device", Guard)
    tensor = torch.arange(4.0)
    alone = with_own_storage(tensor.as_subclass(_OnGPU))
    assert alone.data_ptr() == tensor.data_ptr()
    assert alone.tolist() == tensor.tolist()


def test_tensors_are_created_on_a_named_device() -> None:
    """Without a name it is torch's default device, which is the host: NCCL sends no such tensor."""
    made, unnamed = 0, []
    for room in ("core", "gossip", "server"):
        for path in sorted((Path(offbeat.__file__).parent / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES:
                    made += 1
                    if not {"device", "pin_memory"} & {word.arg for word in node.keywords}:
                        unnamed.append(f"{path.name}:{node.lineno}")
    assert made > 20
    assert unnamed == []


def test_trainable_parameters_are_on_one_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter '1.weight' \(on meta\) must be on the device"):
        offbeat.prepare(model, optimizer)


def test_ssp_accumulates_gradients_of_a_gpu_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch adds tensors of one device only. Fake tensors are of a GPU without one."""
    added: list[list[str]] = []

    def add(*lists: list[Tensor]) -> None:
        added.append([tensor.device.type for tensors in lists for tensor in tensors])

    monkeypatch.setattr(torch, "_foreach_add_", add)
    with FakeTensorMode():
        held = [SimpleNamespace(grad=torch.empty(3, device=GPU))]
        outgoing = [torch.zeros(3)]
        session: Any = SimpleNamespace(
            _collected=1,
            _absent=[0],
            _held=held,
            _outgoing=outgoing,
            _require_acceptable_gradients=lambda _: None,
            _cluster=SimpleNamespace(device=SimpleNamespace(finish=lambda: None)),
        )
        SSPSession._collect(session)
    assert session._collected == 2
    assert added == [["cpu", "cpu"]]


def test_values_of_rules_and_codecs_return_to_the_device() -> None:
    """A checkpoint holds host tensors: Q of PowerSGD, and the shard of a scatter."""
    memory: dict[str, Any] = {}
    run = SimpleNamespace(
        flat=SimpleNamespace(),
        actions=SimpleNamespace(
            storage=SimpleNamespace(coding=SimpleNamespace(mark_restored=lambda: None))
        ),
        windows=SimpleNamespace(restart=lambda: None),
        context=SimpleNamespace(memory=memory),
        votes=SimpleNamespace(outcomes={}),
        cursor=SimpleNamespace(resume=lambda *_: None),
    )
    flat = SimpleNamespace(parameter_tensors=lambda: [torch.empty(1, device="meta")])
    engine: Any = SimpleNamespace(run=run, flat=flat, begin=lambda: None)
    saved = {"grad": {"0": {"q": torch.ones(3, 2)}, "1": {"mean": torch.ones(2)}}, "n": 3}
    state = {"planned": 1, "buffers": {}, "gradients": None, "iterations": [], "votes": {}}
    position.restore(engine, {**state, "memory": saved})
    assert memory["grad"]["0"]["q"].device.type == "meta"
    assert memory["grad"]["1"]["mean"].device.type == "meta"
    assert memory["n"] == 3


def saved_on_gpu(state: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The bytes of a state whose tensors were on a GPU when they were saved."""
    file = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:1")
        torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def test_states_from_another_gpu_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may join, and a rank may load, that has no GPU of the sender's number."""
    weight = torch.arange(3.0)
    data = saved_on_gpu({"x": [weight], "buffers": [], "optimizer": {}}, monkeypatch)
    assert torch.equal(packed.load(data)["x"][0], weight)
    given: list[Any] = []
    setup: Any = SimpleNamespace(
        state=SimpleNamespace(set_parameters=lambda x, _: given.extend(x)),
        _model=SimpleNamespace(buffers=list),
        _optimizer=SimpleNamespace(load_state_dict=given.append),
    )
    GossipSetup._unpack_state(setup, data)
    assert torch.equal(given[0], weight)


# ---- NCCL -------------------------------------------------------------------------------------


def test_hosts_of_a_lab_are_hosts_to_nccl() -> None:
    """They share name and boot id, so NCCL would send through memory past the shaped links."""
    lab = Lab(Cluster.simple(2), "any")
    ids = [rank_environment(lab, rank, 1, 2, 0).get("NCCL_HOSTID") for rank in range(2)]
    assert None not in ids
    assert len({*ids}) == 2
    assert "NCCL_HOSTID" not in rank_environment(NoLab(Cluster.simple(2)), 0, 1, 2, 0)


def test_an_interface_that_nccl_has_chosen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(connecting, "_has_used_nccl", lambda: True)
    link = LinkSpec("nccl:eth1", "eth1", "nccl")
    with pytest.warns(RuntimeWarning, match="set NCCL_SOCKET_IFNAME=eth1 before the start"):
        connecting._warn_of_earlier_nccl([link])
    for silent in (LinkSpec("eth1", "eth1", "gloo"), LinkSpec("nccl", None, "nccl")):
        connecting._warn_of_earlier_nccl([silent])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth1")
    connecting._warn_of_earlier_nccl([link])


def test_ranks_that_share_a_gpu_are_named() -> None:
    hosts = ["a", "a", "b", "b"]
    one, other = ("GPU-1", 2), ("GPU-2", 2)
    notice = startup._shared_gpu_notice(hosts, [one, one, one, other])
    assert notice is not None
    assert notice.startswith("ranks 0, 1 of host a use the same GPU")
    assert startup._shared_gpu_notice(hosts, [one, other, one, other]) is None
    alone = ("GPU-1", 1)
    assert startup._shared_gpu_notice(hosts, [alone] * 4) is None, "there is no other GPU"
    assert startup._shared_gpu_notice(hosts, [None] * 4) is None


# ---- launches ---------------------------------------------------------------------------------


def test_unscaling_takes_few_launches() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    for i, p in enumerate(parameters):
        p.grad = torch.full((3,), float(i))
    optimizer: Any = SimpleNamespace(
        param_groups=[{"params": parameters[:5]}, {"params": parameters[5:]}],
        _session=SimpleNamespace(on_scaler_step=lambda **_: None),
        found_inf=torch.tensor(0.0),
        grad_scale=torch.tensor(4.0),
    )
    with Launches() as launches:
        assert not Optimizer._unscale_gradients(optimizer)
    assert [p.grad.tolist() for p in parameters] == [[i / 4] * 3 for i in range(20)]
    assert launches.names.total() < 10


# ---- memory -----------------------------------------------------------------------------------


def test_pinned_memory_has_the_size_of_the_largest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator would round 1,000,003 numbers up to a power of two, and keep all sizes."""
    pinned: dict[int, int] = {}
    steps: list[str] = []

    def register(address: int, size: int, flags: int) -> int:
        steps.append("register")
        pinned[address] = size
        return flags

    def unregister(address: int) -> None:
        steps.append("unregister")
        del pinned[address]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    stream = SimpleNamespace(synchronize=lambda: steps.append("wait"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    scratch, like = collectives_module.Scratch(pinned=True), _Memory("x", [], is_cuda=True)
    for size in (10, 1_000_003, 500):
        host = scratch.reserve(like, size)  # type: ignore[arg-type]
        assert (host.numel(), host.device.type) == (size, "cpu")
        del host
    assert [*pinned.values()] == [4 * 1_000_003]
    # No copy may be under way when memory is freed.
    assert steps == ["wait", "register", "wait", "unregister", "register"]


def test_decoded_messages_are_kept_for_their_readers() -> None:
    """The thread of a link has allocated them. Its next message would reuse their memory as soon as
    the references are gone, whatever compute still reads."""
    steps: list[Any] = []

    class Device(CPU):
        def follow(self, mark: Any) -> None:
            steps.append("follow")

        def keep(self, tensors: Any) -> None:
            steps.append([*tensors])

    link = LinkThread("net", Collectives({}, _no_send), CPU())
    message, decoded = link.enqueue(TRANSFER, 0), torch.ones(3)

    def coded(one: Message, _: Any) -> int:
        one.tensors = [decoded]
        return 4

    message.coded = coded
    link.release(message, ())
    flat: Any = SimpleNamespace(buckets=[SimpleNamespace(name="w")])
    Waiting(Device(), _Control(), 5.0, Observer(), lambda _: None).wait(message, flat)  # type: ignore[arg-type]
    assert link.close()
    assert steps == ["follow", [decoded]]


def test_members_follow_the_results_that_they_send() -> None:
    """After a failure. The thread of the link alone has waited for the device."""
    steps: list[Any] = []
    message = Message(TRANSFER, 4, 3)
    message.end = "end of the message"
    cluster = SimpleNamespace(
        device=SimpleNamespace(follow=steps.append),
        links={"net": SimpleNamespace(detach=lambda: message)},
    )
    changes: Any = object.__new__(MemberChanges)
    changes._begins_at, changes._cluster = None, cluster
    changes._session = SimpleNamespace(iteration=5, has_plan=True)
    changes._engine = SimpleNamespace(iteration=5, waiting=SimpleNamespace(since_s=None))
    changes._united_at = -1
    changes._member = SimpleNamespace(epoch=SimpleNamespace(first_iteration=0))
    changes._meet_again = steps.append
    changes.recover(RuntimeError("a member is lost"))
    assert steps == ["end of the message", "a member is lost"]
    assert changes._results == {"net": (3, message.tensors)}


# ---- votes ------------------------------------------------------------------------------------


def test_votes_are_on_the_host() -> None:
    """A decision does not wait for the GPU, and no group of NCCL carries it."""
    released: list[Tensor] = []
    link: Any = SimpleNamespace(
        name="net#vote",
        enqueue=lambda *_: None,
        release=lambda _, tensors: released.extend(tensors),
    )
    flat: Any = SimpleNamespace(parameter_tensors=lambda: [torch.empty(1, device="meta")])
    votes = Votes({vote_channel("net"): link}, None, flat, 1, 3)  # type: ignore[arg-type]
    vote = Vote("v", "changed", Moment("step"), Moment("end"), Phases())
    votes.send_ballots([vote], 0, [True])
    assert [t.tolist() for t in released] == [[[0.0, 1.0, 0.0]]]


def test_channels_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: dict[str, str] = {}

    def group(_: Any, name: str, spec: LinkSpec, _parts: Any) -> Any:
        backends[name] = str(spec.backend)
        return SimpleNamespace(size=lambda: 1)

    monkeypatch.setattr(JobCluster, "_group", group)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0])
    specs = {"net": LinkSpec("net", "eth0", "nccl")}
    cluster = JobCluster(SimpleNamespace(), specs, GPU, CPU(), 1.0)  # type: ignore[arg-type]
    cluster.open(["net", "net#1", vote_channel("net")])
    for link in cluster.links.values():
        assert link.close()
    assert backends == {"net": "nccl", "net#1": "gloo", vote_channel("net"): "gloo"}


@pytest.mark.parametrize(
    ("backends", "shards", "refused"),
    [
        (["nccl", "gloo"], False, False),
        (["nccl", "nccl"], False, True),
        (["nccl", "gloo"], True, True),
        (["gloo", "gloo"], True, False),
    ],
)
def test_one_group_of_nccl_is_in_use(backends: list[str], shards: bool, refused: bool) -> None:
    specs = [LinkSpec(f"eth{i}", f"eth{i}", name) for i, name in enumerate(backends)]
    text = "link .eth0. and .* must not both use NCCL, .*; give gloo:eth0 instead"
    with pytest.raises(ValueError, match=text) if refused else nullcontext():
        require_one_order(specs, shards=shards)


class _Group:
    """A group of NCCL, or of gloo."""

    def __init__(self, backend: str) -> None:
        self.backend = backend


def test_groups_of_nccl_are_aborted_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the script's `destroy_process_group` raises, or waits for a stopped rank."""
    aborted: list[Any] = []
    over_nccl, over_gloo, default = _Group("nccl"), _Group("gloo"), _Group("nccl")
    known = dict.fromkeys((over_nccl, over_gloo, default))
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=known))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=default))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: group.backend)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", aborted.append)
    cluster = JobCluster(SimpleNamespace(), {}, GPU, CPU(), 1.0)  # type: ignore[arg-type]
    cluster.groups = {"net": over_nccl, "net#1": over_gloo, "world": default}  # type: ignore[dict-item]
    cluster._everyone = over_nccl  # type: ignore[assignment] # where all replicas have one rank
    cluster.abort()
    assert aborted == [over_nccl]


def test_messages_among_all_ranks_on_the_host() -> None:
    """The job of a test marked `gpu` has the expected results without one."""
    for same in run_ranks(2, gpu_jobs.send_over_gloo, "cpu"):
        assert same == gpu_jobs.ALL_SAME


# ---- gossip -----------------------------------------------------------------------------------


def test_holders_of_gossip_parameters_follow_each_other_on_the_device() -> None:
    """The lock alone orders the host; the training thread may use any stream."""
    steps: list[Any] = []

    class Device(CPU):
        def mark(self) -> int:
            steps.append("mark")
            return len(steps)

        def follow(self, mark: int) -> None:
            steps.append(mark)

    x = torch.ones(4)
    state = State([x], Wire([x]), AVERAGING, device=Device())
    state.refresh()
    state.step(1.0, lambda: steps.append("update"))
    assert steps == ["mark", 1, "mark", 3, "update", "mark"]


# ---- records ----------------------------------------------------------------------------------


def test_recording_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """An iteration is recorded once the device has reached its end, in order."""
    reached: set[float] = set()
    asked: list[float] = []

    class Device(CPU):
        def has_reached(self, mark: float) -> bool:
            return mark in reached

        def seconds(self, mark: float) -> float:
            asked.append(mark)
            return mark

    recorder, writer = Recorder(), LineWriter(tmp_path, 0)
    recorder.origin_s = 0.0
    log = IterationLog(recorder, writer.line, 0, Device())
    log.start("x", 0)
    names = ("begin", "forward", "forward_end", "backward_end", "waited", "step", "stepped", "end")
    for i in range(4):
        marks = Timestamps(**dict.fromkeys(names, float(i)))
        log.add(Iteration(i, marks, []))
        assert {*asked} == {float(at) for at in range(i - 1)}, "two iterations late"
        if i:
            reached.add(i - 1.0)
    log.end()
    assert load_rank(rank_file(tmp_path, 0)).trace.ends_s == ((0.0, 1.0, 2.0, 3.0),)


# ---- alignment --------------------------------------------------------------------------------


ODD = Case("conv", "adam", "step", torch.float32)


ALIGNED = ("dear", "diloco:period=3:fragments=2:delay=1", "cyclic", "local-sgd:period=2:wire=int4")


def train_aligned(folder: str) -> list[dict[str, Any]]:
    """Bits after training with and without gaps, and after a change between the two."""
    found = []
    for number, strategy in enumerate(ALIGNED):
        bits, path = {}, f"{folder}/{number}"
        for kind, gpu in (("cpu", None), ("gpu", ("GPU-1", 1))):
            startup.gpu_of = lambda _, gpu=gpu: gpu
            with jobs.job(parse(strategy), ODD) as job:
                job.train(range(3))
                job.save(f"{path}-{kind}").wait()
                job.train(range(3, 6))
                bits[kind] = job.digest()
                session = job.model._session
                bits[f"{kind} alignment"] = session.engine.flat.alignment_bytes
            bits[f"{kind} sent"] = sum(session.traffic().values())  # after the last message
        for kind, gpu in (("cpu", ("GPU-1", 1)), ("gpu", None)) if number else ():
            startup.gpu_of = lambda _, gpu=gpu: gpu
            with jobs.job(parse(strategy), ODD) as job:
                assert job.load(f"{path}-{kind}").exact
                job.train(range(3, 6))
                bits[f"{kind} resumed"] = job.digest()
        found.append(bits)
    return found


def test_gaps_change_no_bit_and_checkpoints_cross_devices(tmp_path: Path) -> None:
    """Codecs see other blocks with gaps. All else computes the same, and a run that was saved on
    one kind of device goes on to the same bits on the other."""
    for rank in run_ranks(2, train_aligned, str(tmp_path), timeout_s=100.0):
        for name, bits in zip(ALIGNED, rank, strict=True):
            assert (bits["cpu alignment"], bits["gpu alignment"]) == (1, 16)
            if "wire" not in name:
                assert bits["gpu"] == bits["cpu"], name
                assert bits["gpu sent"] > bits["cpu sent"], "gaps are sent, and counted"
            for kind in ("cpu", "gpu"):
                assert bits.get(f"{kind} resumed", bits[kind]) == bits[kind], name
