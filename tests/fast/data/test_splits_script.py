"""benchmarks/data_splits.py: labels of every kind of file, numbers as JSON, a picture."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from cases.scripts import benchmark

from offbeat.data import Dirichlet, Partition

script = benchmark("data_splits")

LABELS = [0, 1, 2, 2, 1, 0, 0, 2, 1, 0, 0, 0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("labels.npy", np.array(LABELS, dtype=np.uint8))
    (tmp_path / "labels.json").write_text(json.dumps(LABELS))
    (tmp_path / "labels.csv").write_text("x,label\n" + "".join(f"a, {i}\n" for i in LABELS))
    (tmp_path / "bare.csv").write_text("".join(f"{i}\n" for i in LABELS))
    (tmp_path / "texts.csv").write_text("".join(f"{'abc'[i]}\n" for i in LABELS))
    return tmp_path


def json_of(capsys, argv):
    return json.loads(picture_of(capsys, f"{argv} --json"))


def picture_of(capsys, argv):
    script.main(argv.split())
    return capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["labels.npy", "labels.json", "labels.csv", "bare.csv"])
def test_labels_of_a_file(name, capsys):
    summary = json_of(capsys, f"{name} --workers 3")
    assert summary["classes"] == ["0", "1", "2"]
    assert np.sum(summary["chunks"], axis=0).tolist() == [6, 3, 3]
    assert [reader["samples"] for reader in summary["per_worker"]] == [4, 4, 4]


@pytest.mark.usefixtures("here")
def test_texts_are_classes(capsys):
    assert json_of(capsys, "texts.csv")["classes"] == ["a", "b", "c"]


def test_histograms_weights_and_skew(here, capsys):
    argv = "labels.npy --split label-skew --classes 1 --workers 3 -o split.json"
    summary = json_of(capsys, argv)
    shares = Partition.load(here / "split.json").shares
    for reader, share in zip(summary["per_worker"], shares, strict=True):
        counts = Counter(LABELS[i] for i in share)
        assert reader["histogram"] == [counts[c] for c in range(3)]
        assert reader["weight"] == len(share) / 12
        (only,) = counts
        assert reader["skew"] == pytest.approx(1 - LABELS.count(only) / 12)


@pytest.mark.usefixtures("here")
def test_seldp_reads_all_chunks_in_a_circle(capsys):
    default, selective = (
        json_of(capsys, f"labels.npy --split {split} --workers 3") for split in ("defdp", "seldp")
    )
    assert [r["reads"] for r in default["per_worker"]] == [[0], [1], [2]]
    assert [r["reads"] for r in selective["per_worker"]] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert [r["histogram"] for r in selective["per_worker"]] == [[6, 3, 3]] * 3
    assert [r["weight"] for r in selective["per_worker"]] == [1 / 3] * 3
    assert selective["chunks"] == default["chunks"]


@pytest.mark.long
def test_options_reach_the_split(capsys):
    from sklearn.datasets import load_digits  # a second in the collection of each process

    argv = "--digits --split dirichlet --alpha 0.3 --sizes 1,2,1 --workers 3 --seed 5"
    summary = json_of(capsys, argv)
    labels = load_digits().target
    expected = Dirichlet(0.3, (1, 2, 1)).partition(labels, 3, seed=5)
    assert summary["chunks"] == expected.histogram(labels).tolist()


@pytest.mark.usefixtures("here")
def test_a_picture(capsys):
    text = picture_of(capsys, "labels.npy --split label-skew --classes 1 --workers 3")
    assert "label-skew(classes=1): 12 samples, 3 workers" in text
    assert text.count("6 ██") == 1
    assert text.count("3 ▒▒") == 2
    assert text.count("0 ··") == 6


def test_a_picture_of_many_classes(here, capsys):
    (here / "many.json").write_text(json.dumps(list(range(20)) * 2))
    text = picture_of(capsys, "many.json --workers 1")
    assert "20 classes" in text
    assert "█" * 20 in text


@pytest.mark.usefixtures("here")
def test_a_picture_of_many_workers(capsys):
    text = picture_of(capsys, "labels.npy --split seldp --workers 9")
    assert " 8 0 .. 7 " in text


def test_shades_grow():
    SHADES, shade = script.SHADES, script.shade  # noqa: N806
    shades = [SHADES.index(shade(count, 9)) for count in range(10)]
    assert all(a <= b for a, b in pairwise(shades))
    assert (shades[0], shades[1], shades[9]) == (0, 1, len(SHADES) - 1)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "either a file of labels or --digits"),
        ("labels.npy --digits", "either a file of labels or --digits"),
        ("bad.json", "bad.json holds no labels"),
        ("nan.json --workers 2", "NaN among them"),
        ("labels.npy --workers 13", "samples (12) must be at least 13"),
        ("labels.npy --workers 0", "workers (0) must be an integer of at least 1"),
        ("labels.npy --classes 2", "--classes (2) must come with --split label-skew, not defdp"),
        ("labels.npy --split dirichlet --alpha nan", "alpha (nan) must be a finite number above 0"),
        ("labels.npy --split label-skew --workers 1", "raise classes to 3"),
        ("labels.npy --sizes 1,2", "sizes (2 entries) must have one entry per worker (4)"),
        ("labels.npy --sizes 1,x", "--sizes ('1,x') must be numbers with commas between"),
    ],
)
def test_what_cannot_be_split(argv, words, here):
    (here / "bad.json").write_text("{")
    (here / "nan.json").write_text("[0, 1, NaN]")
    with pytest.raises(ValueError, match=re.escape(words)):
        script.main(argv.split())
