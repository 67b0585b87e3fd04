"""What tests of data share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before any process group: an earlier test of this process may have joined one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
