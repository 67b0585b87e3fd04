"""Application of the command line: entry point, exit codes, and the order of its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from cyclopts import App, CycloptsError

from offbeat.cli.output import FAILED, INTERRUPTED, WRONG_USE

SCRIPT_COMMANDS = ("run", "profile", "compare", "join", "rehearse", "advise")
PREDICTING_COMMANDS = ("rehearse", "advise")  # their own options may follow the script
MODULE = "-m"  # as for python: the module's name and arguments follow

app = App(
    name="offbeat",
    version=metadata.version("offbeat"),
    help_format="plaintext",
    help=(
        "Train data-parallel over slow networks: measure, plan, predict, run, compare.\n\n"
        "Example: offbeat compare --hosts 4 --rate 100mbit train.py --steps 50\n"
        "Options come before the script; what follows the script belongs to the script."
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: success, 1: the script failed, 2: wrong use, 130: interrupted with Ctrl-C.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    try:
        if moved := moved_options(typed):
            print(
                f"offbeat: note: {', '.join(moved)} after the script: read by offbeat {typed[0]}; "
                "write -- before options of the script",
                file=sys.stderr,
            )
        command, bound, *_ = app.parse_args(
            mark_script(typed), exit_on_error=False, print_error=False
        )
        return command(*bound.args, **bound.kwargs) or 0
    except KeyboardInterrupt:
        return _print_error("interrupted", INTERRUPTED)
    except CycloptsError as error:
        where = " ".join(["offbeat", *typed[:1]]) if typed[0] in app else "offbeat"
        return _print_error(f"{' '.join(str(error).split())} See `{where} --help`.", WRONG_USE)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        path = "" if error.filename is None else f"{error.filename}: "
        return _print_error(f"{path}{error.strerror or error}; check the path", WRONG_USE)
    except ValueError as error:
        return _print_error(str(error), WRONG_USE)
    except RuntimeError as error:
        from offbeat.lab import LabError

        if not isinstance(error, LabError):
            raise
        return _print_error(str(error), WRONG_USE)


def _print_error(text: str, code: int) -> int:
    print(f"offbeat: {text}", file=sys.stderr)
    return code


def mark_script(argv: list[str]) -> list[str]:
    """Insert "--" before the script, so that all arguments after it are passed to the script."""
    if not argv or argv[0] not in SCRIPT_COMMANDS:
        return argv
    if argv[0] == "profile":
        argv = _output_first(argv)
    at = _script_position(argv)
    if argv[at : at + 1] in ([], ["--"]):
        return argv
    if argv[0] in PREDICTING_COMMANDS:
        return _options_first(argv, at)
    return [*argv[:at], "--", *argv[at:]]


def _option_tokens(command: str) -> dict[str, int]:
    """Return the number of values of each option of a command."""
    arguments = app[command].assemble_argument_collection()
    return {name: argument.token_count()[0] for argument in arguments for name in argument.names}


def _script_position(argv: Sequence[str]) -> int:
    """Return the index of the script, or of "--" before it; the length of `argv` without one."""
    tokens, at = _option_tokens(argv[0]), 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in (MODULE, "--"):
        at += 1 + tokens.get(argv[at], 0)
    return min(at, len(argv))


def _options_first(argv: Sequence[str], at: int) -> list[str]:
    """Move the command's options that follow the script before it, up to "--"."""
    tokens, end = _option_tokens(argv[0]), at + (2 if argv[at] == MODULE else 1)
    own, passed, rest = list[str](), list[str](), [*argv[end:]]
    while rest and rest[0] != "--":
        name, has_value, _ = rest[0].partition("=")
        is_own = name.startswith("--") and name in tokens
        count = 1 + (tokens[name] if is_own and not has_value else 0)
        (own if is_own else passed).extend(rest[:count])
        del rest[:count]
    return [*argv[:at], *own, "--", *argv[at:end], *passed, *rest[1:]]


def moved_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a command that predicts, where they follow the script."""
    if not argv or argv[0] not in PREDICTING_COMMANDS or "--help" in argv:
        return []
    at = _script_position(argv)
    if argv[at : at + 1] in ([], ["--"]):
        return []
    first = _options_first(argv, at)
    return [text for text in first[at : first.index("--", at)] if text.startswith("--")]


def _output_first(argv: list[str]) -> list[str]:
    """Move a final `-o FILE.json` of `profile` before the script, unless one is there already."""
    names = {"-o", "--output"}
    if len(argv) < 4 or not argv[-1].endswith(".json") or argv[-2] not in names:
        return argv
    return argv if names & set(argv[:-2]) else [argv[0], *argv[-2:], *argv[1:-2]]


def misplaced_option_notes(command: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each option of the command that stands after the script.

    Such options are passed to the script.
    """
    known = {n for a in app[command].assemble_argument_collection() for n in a.names}
    typed = dict.fromkeys(arg.partition("=")[0] for arg in args)
    return tuple(
        f"{name} stands after the script, so only the script gets it; put it before "
        "the script to have offbeat use it"
        for name in typed
        if name in known and name.startswith("--")
    )
