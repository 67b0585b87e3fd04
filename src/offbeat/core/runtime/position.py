"""Position of an engine between two iterations, saved and restored by checkpoints.

Messages of earlier iterations may be due in later iterations. To save a position, wait for such
messages without storing their results. The restoring process sees them as arrived, and stores the
results when they are due.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from offbeat.core.buckets.flat import Flat
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.transport.link import Message

State = dict[str, Any]
_NO_MESSAGE = {
    "tensors": None,
    "errors": (),
    "age": None,
    "culprits": [],
    "is_foreign": False,
}


def capture(engine: Engine) -> State:
    """Return the state on which later iterations depend, except weights and optimizer state.

    The tensors belong to the engine; copy them before the next iteration. Raise RuntimeError within
    an iteration.
    """
    engine.machine.require_alive()
    if engine.cursor.now is not None:
        raise RuntimeError(
            "an iteration is under way; save between iterations: after optimizer.step() and before "
            "the next forward in training mode"
        )
    engine.flush()
    engine.run.actions.wait_for_sends()
    engine.run.actions.restart_coding()
    run = engine.run
    return {
        "alignment_bytes": run.flat.alignment_bytes,
        "planned": run.cursor.planned,
        "iterations": [_capture_iteration(engine, one) for one in run.cursor.recent()],
        "buffers": {name: run.flat.contents(name) for name in _saved_buffers(engine)},
        "gradients": run.gradients.flags() if run.traits.late else None,
        "memory": run.context.memory,
        "votes": run.votes.outcomes,
    }


def restore(engine: Engine, state: Mapping[str, Any]) -> None:
    """Continue from a captured state. The engine must have adopted the captured plan immediately
    before."""
    run, planned = engine.run, state["planned"]
    where = engine.flat.parameter_tensors()[0].device
    run.reloaded = False
    for name, contents in state["buffers"].items():
        run.flat.fill(name, contents)
    if state["gradients"] is not None:
        run.gradients.restore(state["gradients"])
    run.actions.storage.coding.mark_restored()
    run.windows.restart()
    run.context.memory.update(_on_device(state["memory"], where))
    run.votes.outcomes.update(state["votes"])
    recent = [_restore_iteration(engine, saved, planned, where) for saved in state["iterations"]]
    run.cursor.resume(planned, recent)
    engine.begin()


def resume_at(engine: Engine, planned: int) -> None:
    """Continue at iteration `planned` of a plan that was adopted immediately before.

    All messages of earlier iterations must have arrived, and their results must be stored.
    """
    nothing = {"messages": {}, "settings": None, "skipped": False}
    where = engine.flat.parameter_tensors()[0].device
    recent = [
        _restore_iteration(engine, {**nothing, "planned": earlier}, planned, where)
        for earlier in range(max(0, planned - engine.run.program.lag), planned)
    ]
    engine.cursor.resume(planned, recent)


def _saved_buffers(engine: Engine) -> list[str]:
    """Return the names of the buffers that a checkpoint contains.

    The checkpoint of the model contains the parameters. Gradients are saved only if the plan
    accumulates them; otherwise the training loop zeroes them.
    """
    late = engine.run.traits.late
    return [
        name
        for name, buffer in engine.plan.all_buffers.items()
        if buffer.kept
        and buffer.kind != "state"
        and (name != "param" or buffer.copies > 1)
        and (name != "grad" or late)
    ]


def _capture_iteration(engine: Engine, iteration: Iteration) -> State:
    """Return the state of a finished iteration: its settings and its outstanding messages."""
    run, messages = engine.run, {}
    for index in sorted(iteration.outstanding):
        message = iteration.messages[index]
        contents = run.actions.contents(iteration.planned)[index]
        if message.transfer.in_place and not contents.in_place:
            run.actions.complete(message)  # a message in place is in the storage now, too
        else:
            engine.waiting.wait(message, run.flat)
        in_storage = message.transfer.in_place or contents.in_place
        messages[index] = {
            "tensors": None if in_storage else tuple(message.tensors),
            "errors": tuple(message.errors),
            "is_foreign": message.is_foreign,
            "age": _age_of_copy(run.flat, message),
            "culprits": list(message.culprits),
        }
    settings = iteration.settings
    return {
        "planned": iteration.planned,
        "skipped": iteration.skipped,
        "settings": None if settings is None else run.updates.stepper.as_list(settings),
        "messages": messages,
    }


def _age_of_copy(flat: Flat, message: Message) -> int | None:
    """Return the age of the copy of the buffer to which the result of a message belongs; None if
    the message is in place or has another target buffer."""
    if message.copy is None:
        return None
    buffer = message.transfer.payload.buffer
    ages = range(flat.copies(buffer))
    return next(age for age in ages if flat.copy_index(buffer, age) == message.copy)


def _on_device(values: Any, where: torch.device) -> Any:
    """Return nested containers with all tensors on a device. Checkpoints hold host tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(where), values)


def _restore_iteration(
    engine: Engine, saved: Mapping[str, Any], planned: int, where: torch.device
) -> Iteration:
    """Return a finished iteration from its saved state, with its outstanding messages as
    arrived."""
    run, now = engine.run, engine.iteration
    number = now - (planned - saved["planned"])
    messages, restored = saved["messages"], []
    for index, contents in enumerate(run.actions.contents(saved["planned"])):
        state, t = messages.get(index, _NO_MESSAGE), contents.transfer
        message = Message(t, number, -1, None if state["tensors"] is None else contents)
        message.released = message.start = message.end = engine.device.mark()
        message.tensors = _on_device(list(state["tensors"] or ()), where)
        message.errors = _on_device(list(state["errors"]), where)
        message.culprits, message.is_foreign = state["culprits"], state["is_foreign"]
        if state["age"] is not None:
            message.copy = run.flat.copy_index(t.payload.buffer, state["age"])
        message.arrive()
        restored.append(message)
    listed = saved["settings"]
    return Iteration(
        number,
        Timestamps(),
        restored,
        planned=saved["planned"],
        steps=run.program.steps(saved["planned"]),
        skipped=saved["skipped"],
        settings=None if listed is None else run.updates.stepper.from_list(listed),
        outstanding=set(messages),
        over=True,
    )
