"""Every public name is in docs/data.md."""

from pathlib import Path

import pytest

from offbeat import data

TEXT = (Path(__file__).parents[3] / "docs" / "data.md").read_text()


def test_public_names():
    for name in data.__all__:
        assert getattr(data, name).__name__ == name
        assert name in TEXT
    with pytest.raises(AttributeError, match="has no attribute 'Sel'"):
        _ = data.Sel
