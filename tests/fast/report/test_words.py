"""Numbers as words."""

from __future__ import annotations

import pytest

from offbeat.experiments.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 µs"),
        (12.3e-6, "12.3 µs"),
        (0.0009999, "1.00 ms"),
        (0.341, "341 ms"),
        (1.128, "1.13 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_seconds(value, text):
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999.0, "999 B"), (8.39e6, "8.39 MB"), (2e9, "2.00 GB")]
)
def test_size(value, text):
    assert words.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012, "+1.2 %"), (-0.012, "−1.2 %"), (-0.121, "−12 %"), (-0.0003, "0.0 %"), (None, "–")],
)
def test_error(value, text):
    assert words.error(value) == text


def test_the_error_of_a_prediction_is_relative_to_the_measurement():
    assert words.prediction_error(0.412, 0.66) == "−38 %"
    assert words.prediction_error(0.5, 0.4) == "+25 %"
    assert words.prediction_error(0.5, 0.0) == words.NONE


def test_a_column_has_one_unit():
    unit = words.unit_for([1.195, 0.412, None])
    assert [unit.text(s) for s in (1.195, 0.412, None)] == ["1,195", "412", "–"]
    assert words.unit_for([12.0, 3.0]).text(3.0) == "3.00"
    assert words.unit_for([0.0021]).text(0.0021) == "2,100"
    assert words.unit_for([]).text(None) == "–"


def test_counts():
    assert words.count_text(1, "rank") == "1 rank"
    assert words.count_text(4, "rank") == "4 ranks"
