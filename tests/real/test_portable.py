"""Planning and simulating use no part of Linux: the commands run with the POSIX modules, functions
and signals of Python hidden. Neither macOS nor Windows is tried by this."""

import subprocess
import sys
from pathlib import Path

PROFILE = Path(__file__).parents[2] / "docs" / "example.json"
HIDE = """
import os, signal, socket, sys
# Other packages look at the system when they are imported.
import cyclopts, jinja2, networkx, numpy, psutil, pydantic, rich.console, subprocess, zoneinfo

MODULES = ("torch", "pyroute2", "fcntl", "grp", "pwd", "pty", "resource", "termios", "tty")
for name in [n for n in sys.modules if n.partition(".")[0] in MODULES]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(MODULES))  # None: importing raises ModuleNotFoundError
for module, names in {
    os: "fork geteuid getloadavg getpgid getuid killpg pidfd_open sched_getaffinity setns setsid "
        "sysconf uname unshare waitid",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 pthread_sigmask setitimer",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
from offbeat.cli import main
for command in sys.argv[1:]:
    print("#", command)
    assert main(command.split()) == 0
"""


COMMANDS = {
    f"plan --profile {PROFILE} --strategy dreamddp": "param[",
    f"simulate --profile {PROFILE} --strategy ddp,dreamddp,a2cid2,cyclic": "dreamddp",
    f"simulate --profile {PROFILE} --strategy ssp --servers 1": "ssp, seconds per iteration",
    f"simulate --profile {PROFILE} --strategy ddp --rate 10mbit,1gbit --hosts 4,32": "32",
    f"advise --profile {PROFILE}": "the method to take",
    "strategies": "dreamddp",
    "check": "the lab needs Linux (this is win32)",
}


def test_commands_without_posix():
    done = subprocess.run(
        [sys.executable, "-c", HIDE, *COMMANDS],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for shown in done.stdout.split("# ")[1:]:
        command, _, output = shown.partition("\n")
        assert COMMANDS[command] in output, command
    assert done.stdout.count("# ") == len(COMMANDS)
