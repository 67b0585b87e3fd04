"""Launching: environment, output, failures in words, nothing left behind."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from harness.commands import launch_forks
from harness.leftovers import alive, eventually, namespace_users

from offbeat.lab import Cluster, HostOverride, Lab, LabError, Link, NoLab, launch

pytestmark = pytest.mark.timeout(60)

# Starts a child that ignores SIGTERM in a session of its own, prints its process id, and stays.
WITH_GRANDCHILD = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
"""


@pytest.fixture(params=["namespaces", "loopback"])
def any_lab(request):
    """Two hosts, with and without namespaces."""
    if request.param == "loopback":
        with NoLab(Cluster.simple(2), "any") as lab:
            yield lab
        return
    request.getfixturevalue("namespaces")
    with Lab(Cluster.simple(2, "50mbit"), "any") as lab:
        yield lab


def pids_in(lines: list[str]) -> list[int]:
    return [int(word) for line in lines if line.startswith("pids") for word in line.split()[1:]]


def test_a_launch_goes_on_without_a_log_that_cannot_be_written(program, tmp_path):
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    lines = []
    argv = program("print('first'); print('last')")
    with (
        NoLab(Cluster.simple(2)) as lab,
        pytest.warns(RuntimeWarning, match=rf"{tmp_path}/rank0.log.*No space left") as caught,
    ):
        result = launch(
            lab, argv, log_dir=tmp_path, timeout_s=20, on_line=lambda *a: lines.append(a)
        )
    assert (result.problem, result.exit_codes, len(caught)) == (None, (0, 0), 1)
    assert sorted(lines) == [(rank, text) for rank in (0, 1) for text in ("first", "last")]
    assert (tmp_path / "rank1.log").read_text() == "first\nlast\n"


@pytest.mark.usefixtures("namespaces")
def test_ranks_see_torchrun_s_variables_and_the_links(program, tmp_path):
    cluster = Cluster(
        hosts=2,
        processes_per_host=2,
        links=(Link(name="wan", rate="50mbit"), Link(name="lan")),
        overrides=(HostOverride(host=1, threads=3, speed=0.5, jitter=0.1),),
    )
    argv = program("import json, os; print(json.dumps(dict(os.environ)))")
    with Lab(cluster, "variables") as lab:
        result = launch(lab, argv, env={"MINE": "1"}, log_dir=tmp_path / "logs", timeout_s=20)
    assert (result.problem, result.exit_codes) == (None, (0, 0, 0, 0))
    assert result.log_files == tuple(tmp_path / "logs" / f"rank{rank}.log" for rank in range(4))
    seen = [json.loads(path.read_text()) for path in result.log_files]
    for rank, variables in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "4",
            "MASTER_ADDR": "10.77.0.1",
            "TORCHELASTIC_RUN_ID": "variables",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": "3" if rank // 2 == 1 else "1",
            "OFFBEAT_SPEED": "0.5" if rank // 2 == 1 else "1.0",
            "OFFBEAT_JITTER": "0.1" if rank // 2 == 1 else "0.0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "MINE": "1",
        }
        assert expected.items() <= variables.items()
        assert json.loads(variables["OFFBEAT_LINKS"]) == [
            {"name": "wan", "interface": "eth0"},
            {"name": "lan", "interface": "eth1"},
        ]
    assert len({variables["MASTER_PORT"] for variables in seen}) == 1


def test_output_and_variables_of_ranks_on_the_loopback(any_lab, program, tmp_path):
    """Of both streams, also without a last newline. The caller's variables win."""
    argv = program(
        "import os, sys\n"
        "names = ['OMP_NUM_THREADS', 'WORLD_SIZE', 'GLOO_SOCKET_IFNAME', 'MASTER_ADDR']\n"
        "print(*map(os.environ.get, names)); sys.stderr.write('err\\n'); sys.stdout.write('end')\n"
    )
    lines: list[tuple[int, str]] = []
    result = launch(
        any_lab,
        argv,
        env={"OMP_NUM_THREADS": "7"},
        log_dir=tmp_path,
        timeout_s=20,
        on_line=lambda *line: lines.append(line),
    )
    assert (result.problem, result.exit_codes) == (None, (0, 0))
    place = "lo 127.0.0.1" if isinstance(any_lab, NoLab) else "eth0 10.77.0.1"
    for rank in range(2):
        expected = [f"7 2 {place}", "err", "end"]
        assert [text for one, text in lines if one == rank] == expected
        assert result.log_files[rank].read_text() == "\n".join(expected)


WAYS = """
import os, signal, sys, time
way, rank = os.environ["WAY"], os.environ["RANK"]
if way == "fails" and rank == "1":
    for number in range(40): print("line", number)
    sys.exit(3)
if way == "is killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "is killed":
    time.sleep(0.5)
    print("the other side is gone")
    sys.exit(0)
if way == "hangs" and rank == "0":
    print("waiting for nobody", flush=True)
    sys.exit(0)
if way == "hangs":
    print("waiting for nobody", flush=True)
if way == "ignores" and rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(os.environ["FLAG"], "w").close()
if way == "ignores" and rank == "0":
    while not os.path.exists(os.environ["FLAG"]): time.sleep(0.01)
    sys.exit(1)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("way", "timeout_s", "codes", "named"),
    [
        ("fails", 20, (-signal.SIGTERM, 3), ("rank 1 (host 1)", "code 3", "line 39")),
        ("is killed", 20, (0, -signal.SIGKILL), ("rank 1 (host 1)", "SIGKILL")),
        ("ignores", 20, (1, -signal.SIGKILL), ("rank 0 (host 0)",)),
        ("hangs", 1.5, (0, -signal.SIGTERM), ("timeout", "rank 1", "waiting for nobody")),
    ],
)
def test_a_rank_that_does_not_end_well_is_named(way, timeout_s, codes, named, program, tmp_path):
    """With the last lines of its log. The others may report what they see."""
    with NoLab(Cluster.simple(2)) as lab:
        how = {"log_dir": tmp_path, "timeout_s": timeout_s, "grace_s": 0.2}
        how["env"] = {"WAY": way, "FLAG": str(tmp_path / "flag")}
        how |= {"grace_s": 10.0} if way == "is killed" else {}
        result = launch(lab, program(WAYS), **how)
    assert result.exit_codes == codes
    assert [name for name in named if name not in result.problem] == []
    if way == "fails":
        assert "line 25\n" in result.problem
        assert "line 24\n" not in result.problem
        assert str(tmp_path / "rank1.log") in result.problem
    if way == "is killed":
        assert result.log_files[0].read_text() == "the other side is gone\n"


def test_a_program_that_does_not_exist_is_named(any_lab, tmp_path):
    result = launch(any_lab, ["/no/such/program"], log_dir=tmp_path, timeout_s=20)
    assert result.exit_codes == (127, 127)
    assert "/no/such/program" in (result.problem or "")


def test_a_hanging_grandchild_is_killed(any_lab, program, tmp_path):
    lines: list[str] = []
    result = launch(
        any_lab,
        program(WITH_GRANDCHILD),
        log_dir=tmp_path,
        timeout_s=20,
        on_line=lambda _, line: lines.append(line),
    )
    assert result.problem is None  # the ranks themselves ended well
    assert len(pids_in(lines)) == 4
    assert not any(alive(process) for process in pids_in(lines))


def test_an_error_in_the_callback_ends_everything(any_lab, program, tmp_path):
    lines: list[str] = []

    def on_line(_rank: int, line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise ZeroDivisionError

    argv = program(WITH_GRANDCHILD + "time.sleep(600)")
    with pytest.raises(ZeroDivisionError):
        launch(any_lab, argv, log_dir=tmp_path, timeout_s=20, on_line=on_line)
    assert not any(alive(process) for process in pids_in(lines))
    assert launch(any_lab, program(""), log_dir=tmp_path, timeout_s=20).problem is None


def test_wrong_launches_are_refused(program, tmp_path):
    """An empty command, no time, and a second launch at the same time."""
    refused: list[LabError] = []
    argv = program("print('there')")
    with NoLab(Cluster.simple(1)) as lab:

        def on_line(_rank: int, _line: str) -> None:
            with pytest.raises(LabError) as error:
                launch(lab, argv, log_dir=tmp_path / "second", timeout_s=20)
            refused.append(error.value)

        first = launch(lab, argv, log_dir=tmp_path, timeout_s=20, on_line=on_line)
        assert first.problem is None
        assert len(refused) == 1
        for words, seconds, name in (([], 1, "argv"), (["true"], 0, r"timeout_s \(0\)")):
            with pytest.raises(ValueError, match=name):
                launch(lab, words, log_dir=tmp_path, timeout_s=seconds)


@pytest.mark.usefixtures("namespaces")
def test_the_death_of_the_lab_s_own_process_is_an_error(program, tmp_path):
    with Lab(Cluster.simple(2)) as lab:
        lines: list[str] = []

        def on_line(_rank: int, line: str) -> None:
            lines.append(line)
            if len(lines) == 2:
                os.kill(lab.process.pid, signal.SIGKILL)

        argv = program("import os, time; print('pids', os.getpid(), flush=True); time.sleep(600)")
        with pytest.raises(LabError, match="SIGKILL"):
            launch(lab, argv, log_dir=tmp_path, timeout_s=20, on_line=on_line)
        assert eventually(lambda: not any(alive(process) for process in pids_in(lines)))


def test_a_rank_ends_with_its_guard(program, tmp_path):
    pids = []

    def on_line(_rank: int, line: str) -> None:
        pids.extend(pids_in([line]))
        os.kill(pids[-1], signal.SIGKILL)

    argv = program("import os, time; print('pids', os.getpid(), os.getppid()); time.sleep(600)")
    with NoLab(Cluster.simple(1)) as lab:
        result = launch(lab, argv, log_dir=tmp_path, timeout_s=20, on_line=on_line)
    assert result.exit_codes == (-signal.SIGKILL,)
    assert eventually(lambda: not any(map(alive, pids)))


# --- nothing left behind -------------------------------------------------------------------------

OWNER = """
import signal, sys
from offbeat.lab import Cluster, Lab, launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" would ignore it
def on_line(rank, line):
    print(line, flush=True)
with Lab(Cluster.simple(2, "50mbit"), "owned") as lab:
    print("inodes", *lab.inodes(), flush=True)
    print("pids", lab.process.pid, flush=True)
    code = {code!r}
    launch(lab, [sys.executable, "-S", "-c", code], log_dir=tmp, timeout_s=60, on_line=on_line)
"""


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_ends(owner, number):
    process = owner(OWNER.format(code=WITH_GRANDCHILD + "time.sleep(600)"))
    with process:
        lines = [process.stdout.readline() for _ in range(4)]
        inodes = [int(word) for word in lines[0].split()[1:]]
        pids = pids_in(lines)
        assert (len(inodes), len(pids)) == (3, 5)
        assert namespace_users(inodes)
        process.send_signal(number)
        process.wait(15)
    assert eventually(lambda: not any(alive(one) for one in pids))
    assert eventually(lambda: not namespace_users(inodes))


@pytest.mark.usefixtures("namespaces")
def test_a_run_in_the_background_leaves_ctrl_c_to_others(program, tmp_path):
    """A shell's "&" has SIGINT ignored: the owner goes on at one, its ranks end by one."""
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(600)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Lab(Cluster.simple(1)) as lab:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(lab.process.pid, signal.SIGINT)
            result = launch(lab, program(code), log_dir=tmp_path, timeout_s=20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_codes == (-signal.SIGINT,)


@pytest.mark.usefixtures("namespaces")
def test_nothing_is_left_after_the_block(program, tmp_path):
    with Lab(Cluster.simple(2, "50mbit")) as lab:
        assert launch(lab, program(""), log_dir=tmp_path, timeout_s=20).problem is None
        inodes, supervisor = lab.inodes(), lab.process.pid
        assert namespace_users(inodes)
    assert not alive(supervisor)
    assert not namespace_users(inodes)


@pytest.mark.usefixtures("namespaces")
def test_a_lab_made_by_a_thread_outlives_the_thread(program, tmp_path):
    lab = Lab(Cluster.simple(1))
    thread = threading.Thread(target=lab.__enter__)
    thread.start()
    thread.join()
    try:
        assert launch(lab, program(""), log_dir=tmp_path, timeout_s=20).problem is None
        with pytest.raises(LabError), lab:
            pass
    finally:
        lab.close()


# --- torch ---------------------------------------------------------------------------------------

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print("sum", tensor[0].item())
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(60)
def test_gloo_all_reduces_between_two_hosts(tmp_path):
    pytest.importorskip("torch", exc_type=ImportError)
    with Lab(Cluster.simple(2, "100mbit")) as lab:
        script = tmp_path / "script.py"
        script.write_text(ALL_REDUCE)
        how = {"env": {}, "log_dir": tmp_path, "timeout_s": 50.0, "workers": 2}
        result = launch_forks(lab, [sys.executable, str(script)], **how)
        assert lab.counters()[1]["net"].sent_bytes >= 4000
    assert result.problem is None
    assert all("sum 3.0" in Path(log).read_text() for log in result.log_files)
