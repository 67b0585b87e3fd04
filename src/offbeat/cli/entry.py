"""Application of the command line: entry point, exit codes, and where the script begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from cyclopts import App, CycloptsError, Parameter

from offbeat.cli.output import FAILED, INTERRUPTED, WRONG_USE

SCRIPT_COMMANDS = ("run", "profile", "compare", "join", "rehearse", "advise")
MODULE = "-m"  # as for python: the module's name and arguments follow

app = App(
    name="offbeat",
    version=metadata.version("offbeat"),
    help_format="plaintext",
    default_parameter=Parameter(
        negative="",
        show_default=lambda value: None if isinstance(value, bool) else value,
    ),
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
        command, bound, *_ = app.parse_args(
            mark_script(typed), exit_on_error=False, print_error=False
        )
        _note_misplaced(typed, bound.arguments.get("args", ()))
        return command(*bound.args, **bound.kwargs) or 0
    except KeyboardInterrupt:
        return _print_error("interrupted", INTERRUPTED)
    except CycloptsError as error:
        where = " ".join(["offbeat", *typed[:1]]) if typed[0] in app else "offbeat"
        named = isinstance(error.__cause__, ValueError) and str(error.__cause__).startswith("--")
        text = " ".join(str(error.__cause__ if named else error).split())
        stop = "" if text.endswith((".", "?")) else "."
        return _print_error(f"{text}{stop} See `{where} --help`.", WRONG_USE)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        path = "" if error.filename is None else f"{error.filename}: "
        return _print_error(f"{path}{error.strerror or error}; check the path", WRONG_USE)
    except (ValueError, RuntimeError) as error:
        from offbeat.lab import LabError

        if not isinstance(error, (ValueError, LabError)):
            raise
        return _print_error(str(error), WRONG_USE)


def _print_error(text: str, code: int) -> int:
    print(f"offbeat: {text}", file=sys.stderr)
    return code


def mark_script(argv: list[str]) -> list[str]:
    """Insert "--" before the script: the first word that is no option, or "-m". All words after it
    are passed to the script."""
    if not argv or argv[0] not in SCRIPT_COMMANDS:
        return argv
    tokens, at = _option_tokens(argv[0]), 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in (MODULE, "--"):
        at += 1 + tokens.get(argv[at], 0)
    return argv if argv[at : at + 1] in ([], ["--"]) else [*argv[:at], "--", *argv[at:]]


def _option_tokens(command: str) -> dict[str, int]:
    """Return the number of values of each option of a command."""
    arguments = app[command].assemble_argument_collection()
    return {name: argument.token_count()[0] for argument in arguments for name in argument.names}


def _note_misplaced(argv: Sequence[str], args: Sequence[str]) -> None:
    """Print a note for each option of the command among the arguments of its script."""
    known = _option_tokens(argv[0]) if args else {}
    for name in dict.fromkeys(arg.partition("=")[0] for arg in args):
        if name in known and name.startswith("--"):
            print(
                f"offbeat: note: {name} stands after the script, so only the script gets it; put "
                f"it before the script to have offbeat use it",
                file=sys.stderr,
                flush=True,
            )
