"""torch's global settings: numbers stay the same. (Every strategy under a default data type of half
precision: test_randomness.py.)"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from harness.ranks import run_world
from torch import nn

import offbeat
from offbeat.core.measuring import codec_speed
from offbeat.core.strategy.parsing import parse

Context = Callable[[], AbstractContextManager[object]]


@contextmanager
def setting(change: Callable[[object], object], value: object, usual: object) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(usual)


def of(change: Callable[..., object], value: object, usual: object) -> Context:
    return lambda: setting(change, value, usual)


THROUGHOUT: dict[str, Context] = {
    "usual": nullcontext,
    "bfloat16": of(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float16": of(torch.set_default_dtype, torch.float16, torch.float32),
    "float64": of(torch.set_default_dtype, torch.float64, torch.float32),
    # Nothing of ours may be made on the default device unless the model is there.
    "meta": of(torch.set_default_device, "meta", None),
    "deterministic": of(torch.use_deterministic_algorithms, True, False),
    "threads": of(torch.set_num_threads, 3, 1),
    "no_grad": of(torch.set_grad_enabled, False, True),
}
IN_PREPARE: dict[str, Context] = {"inference": torch.inference_mode}
SOME = ("dear", "local-sgd:period=2:wire=int4")


def train(names: list[str], settings: list[str]) -> dict[str, dict[str, list[float]]]:
    """Weights by setting and strategy. Codecs are measured under each setting."""
    codec_speed.codec_speeds = codec_speed.codec_speeds.__wrapped__
    return {s: {name: weights(name, s) for name in names} for s in settings}


def weights(name: str, called: str) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outside = THROUGHOUT.get(called, nullcontext)
    inside = IN_PREPARE.get(called, nullcontext)
    with outside(), contextlib.redirect_stderr(io.StringIO()):
        with inside():
            mine, steps = offbeat.prepare(
                model, optimizer, parse(name), observe=1, min_bucket_bytes=1, timeout_s=20.0
            )
        for _ in range(4):
            steps.zero_grad()
            with torch.enable_grad():
                loss = mine(x).square().mean()
            loss.backward()
            steps.step()
        mine.consolidate()
        found = [w for p in mine.parameters() for w in p.detach().flatten().tolist()]
        mine.close()
    return found


def test_numbers_do_not_depend_on_global_settings() -> None:
    settings = [*THROUGHOUT, *IN_PREPARE]
    for found in run_world(train, 2, list(SOME), settings, timeout_s=100.0):
        for name in settings:
            for strategy in SOME:
                expected = pytest.approx(found["usual"][strategy], rel=0, abs=1e-6)
                assert found[name][strategy] == expected, (name, strategy)
