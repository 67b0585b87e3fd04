"""Exceptions in Lightning reach the other ranks before the model is closed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from offbeat.core.runtime.prepared import Model

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

from offbeat.integrations import lightning_strategies


def test_lightning_publishes_an_exception_before_it_closes_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[Any]()

    class Base:
        def on_exception(self, exception: BaseException) -> None:
            calls.append(exception)

    class Strategy(lightning_strategies.TrainerStrategy, Base):
        pass

    monkeypatch.setattr(
        lightning_strategies, "publish_exception", lambda error, _: calls.append(str(error))
    )
    strategy, error = Strategy.__new__(Strategy), KeyError("x")
    for strategy.model in (torch.nn.Linear(1, 1), Model.__new__(Model)):
        strategy.on_exception(error)
    assert calls == [error, "'x'", error]
