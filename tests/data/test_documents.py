"""The examples of docs/data.md run, and every public name is in it."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from offbeat import data

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SAMPLES = 200


@pytest.mark.parametrize(("block", "workers"), [(0, 4), (1, 1)])
def test_the_examples(block, workers, monkeypatch, request):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(workers))
    if workers > 1:
        request.getfixturevalue("no_world")
    labels = torch.arange(SAMPLES) % 10
    names = {"dataset": TensorDataset(torch.zeros(SAMPLES, 2), labels), "labels": labels}
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[block]
    scope = names | {"epochs": 2, "sampler": None}
    exec(code, scope)
    assert len(scope["x"]) == len(scope["y"]) == 32


def test_public_names():
    for name in data.__all__:
        assert getattr(data, name).__name__ == name
        assert name in TEXT
    with pytest.raises(AttributeError, match="has no attribute 'Sel'"):
        _ = data.Sel
