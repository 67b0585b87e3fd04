"""Errors of waits for other ranks, as opposed to errors of this rank."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist
from torch.distributed import distributed_c10d


def mark_peer_error(error: BaseException) -> None:
    """Record that a wait for other ranks has raised an exception.

    Such an exception is the consequence of a failure of another rank or of the network, not a
    failure of this rank.
    """
    error.is_peer_error = True  # type: ignore[attr-defined]


def is_peer_error(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Return whether a wait for other ranks has raised an exception or one of its causes.

    Recorded facts decide: the mark of `mark_peer_error`, the type of torch's network errors, and
    the function of torch that has raised the exception.
    """
    while error is not None:
        if getattr(error, "is_peer_error", False) or isinstance(error, dist.DistError):
            return True
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        module = trace.tb_frame.f_globals.get("__name__") if trace is not None else None
        # Collectives of gloo raise a plain RuntimeError.
        if isinstance(error, RuntimeError) and module == distributed_c10d.__name__:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        trace = None if error is None else error.__traceback__
    return False


def describe_exception(error: BaseException) -> str:
    """Return the type and the text of an exception, as in "KeyError: 'x'"."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
