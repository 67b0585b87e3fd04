"""Partitions: every sample has one owner, and the owners have what the split promises."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data import Chunks, Dirichlet, LabelSkew, Partition

quick = settings(max_examples=50, deadline=None)


def owned(partition: Partition) -> list[int]:
    return sorted(sample for share in partition.shares for sample in share.tolist())


def counters(partition: Partition, labels) -> list[Counter]:
    """The histogram, counted one by one."""
    return [Counter(labels[sample] for sample in share) for share in partition.shares]


@st.composite
def labelled(draw):
    """Labels in which every class has a sample for each of the workers."""
    workers = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(workers, 30), min_size=1, max_size=8))
    labels = [c for c, size in enumerate(sizes) for _ in range(size)]
    return workers, draw(st.permutations(labels))


# --- chunks --------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 5), st.booleans())
def test_chunks_are_equal_but_for_one_sample(workers, more, seed, shuffle):
    made = Chunks(shuffle=shuffle).partition(workers + more, workers, seed=seed)
    assert owned(made) == list(range(workers + more))
    assert max(made.sizes) - min(made.sizes) <= 1
    assert made.samples == workers + more


@quick
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 500))
def test_relative_sizes(sizes, more):
    samples = len(sizes) + more
    made = Chunks(tuple(sizes)).partition(samples, len(sizes))
    assert owned(made) == list(range(samples))
    exact = [samples * size / sum(sizes) for size in sizes]
    for count, wanted in zip(made.sizes, exact, strict=True):
        if min(exact) >= 1:  # else the poor take from the rich
            assert math.floor(wanted + 1e-9) <= count + 1e-9
            assert count <= math.ceil(wanted - 1e-9)
        assert count >= 1


def test_sizes_that_add_up_are_exact():
    assert Chunks((100, 7, 243)).partition(350, 3).sizes == (100, 7, 243)


def test_unshuffled_chunks_are_slices():
    made = Chunks(shuffle=False).partition(10, 3)
    assert [share.tolist() for share in made.shares] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_data_set_counts_by_its_length():
    assert Chunks().partition(["a"] * 7, 3).to_dict() == Chunks().partition(7, 3).to_dict()


# --- label skew ----------------------------------------------------------------------------------


@quick
@given(labelled(), st.integers(1, 8), st.integers(0, 9))
def test_label_skew_holds_so_many_classes(case, classes, seed):
    workers, labels = case
    known = max(labels) + 1
    if not (classes <= known <= classes * workers):
        with pytest.raises(ValueError, match=r"^classes \("):
            LabelSkew(classes).partition(labels, workers, seed=seed)
        return
    made = LabelSkew(classes).partition(labels, workers, seed=seed)
    assert owned(made) == list(range(len(labels)))
    counts = counters(made, labels)
    assert all(len(count) == classes for count in counts)
    holders = [[count[c] for count in counts if c in count] for c in range(known)]
    assert max(map(len, holders)) - min(map(len, holders)) <= 1
    assert all(max(numbers) - min(numbers) <= 1 for numbers in holders)


def test_holders_divide_a_class_by_size():
    made = LabelSkew(1, sizes=(1, 3)).partition([0] * 40, 2)
    assert made.sizes == (10, 30)


# --- Dirichlet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [None, (1.0, 1.0, 2.0)])
def test_proportions_have_a_dirichlet_distributions_moments(sizes):
    classes, each, alpha = 3000, 60, 0.4
    labels = np.repeat(np.arange(classes), each)
    made = Dirichlet(alpha, sizes).partition(labels, 3, seed=1)
    parts = made.histogram(labels) / each
    mean = np.array(sizes or (1, 1, 1)) / sum(sizes or (1, 1, 1))
    variance = mean * (1 - mean) / (3 * alpha + 1)
    np.testing.assert_allclose(parts.mean(axis=1), mean, atol=0.03)
    np.testing.assert_allclose(parts.var(axis=1), variance, rtol=0.08)


@quick
@given(labelled(), st.sampled_from([1e-6, 0.01, 0.5, 10.0]), st.integers(1, 3), st.integers(0, 9))
def test_nobody_has_less_than_the_least(case, alpha, least, seed):
    workers, labels = case
    if len(labels) < workers * least:
        with pytest.raises(ValueError, match=r"^samples \("):
            Dirichlet(alpha, least=least).partition(labels, workers, seed=seed)
        return
    made = Dirichlet(alpha, least=least).partition(labels, workers, seed=seed)
    assert owned(made) == list(range(len(labels)))
    assert min(made.sizes) >= least


def test_a_large_alpha_is_no_skew():
    labels = np.repeat(np.arange(5), 400)
    histogram = Dirichlet(1e6).partition(labels, 4).histogram(labels)
    assert np.abs(histogram - 100).max() <= 2


# --- all splits ----------------------------------------------------------------------------------

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(6), 20))


@pytest.mark.parametrize("split", [Chunks(), LabelSkew(3), Dirichlet(0.3)])
def test_a_seed_is_a_partition(split):
    first, again, other = (split.partition(LABELS, 4, seed=seed) for seed in (1, 1, 2))
    assert first.to_dict() == again.to_dict()
    assert first.digest == again.digest
    assert first.to_dict() != other.to_dict()
    assert first.digest != other.digest


@pytest.mark.parametrize("split", [Chunks(), LabelSkew(3), Dirichlet(0.3)])
def test_partitions_are_json(split, tmp_path):
    made = split.partition(LABELS, 4)
    made.save(tmp_path / "split.json")
    loaded = Partition.load(tmp_path / "split.json")
    assert loaded.to_dict() == made.to_dict() == json.loads(json.dumps(made.to_dict()))
    assert loaded.digest == made.digest


def test_histogram_counts_classes():
    made = Dirichlet(0.3).partition(LABELS, 4)
    expected = [[count[c] for c in range(6)] for count in counters(made, LABELS)]
    assert made.histogram(LABELS).tolist() == expected


def test_texts_are_classes_in_alphabetical_order():
    made = Partition(([0, 1, 2], [3]))  # type: ignore[arg-type]
    assert made.histogram(["b", "a", "b", "c"]).tolist() == [[1, 2, 0], [0, 0, 1]]


def test_digest_tells_where_a_share_ends():
    assert Partition(([0, 1], [2])).digest != Partition(([0], [1, 2])).digest  # type: ignore[arg-type]


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Chunks().partition(3, 4), "samples (3) must be at least 4"),
        (lambda: Chunks().partition(3, 0), "workers (0) must be an integer of at least 1"),
        (lambda: Chunks().partition(3, 2, seed=-1), "seed (-1) must be an integer of at least 0"),
        (lambda: Chunks((1, 2)).partition(9, 3), "sizes (2 entries) must have one entry per"),
        (lambda: Chunks((1, 0)), "sizes[1] (0) must be a finite number above 0"),
        (lambda: Chunks((1, math.nan)), "sizes[1] (nan) must be a finite number above 0"),
        (lambda: LabelSkew(0), "classes (0) must be an integer of at least 1"),
        (lambda: LabelSkew(3).partition([0, 1, 0], 2), "classes (3) must be at most the 2 classes"),
        (lambda: LabelSkew(1).partition([0, 1, 2], 2), "raise classes to 2"),
        (lambda: LabelSkew(2).partition([0, 0, 0, 1], 2), "class 1 (1 samples) must have a sample"),
        (lambda: Dirichlet(0.0), "alpha (0.0) must be a finite number above 0"),
        (lambda: Dirichlet(math.nan), "alpha (nan) must be a finite number above 0"),
        (lambda: Dirichlet(1.0).partition([0, 1], 3), "samples (2) must be at least 3"),
        (lambda: Dirichlet(1.0).partition([0, 2, 0], 2), "class 1 is empty"),
        (lambda: LabelSkew(1).partition([1, 1, 1], 2), "class 0 is empty"),
        (lambda: LabelSkew(1).partition([0, 10**12], 2), "must be below the number of samples (2)"),
        (lambda: Dirichlet(1.0).partition([0, -1], 2), "labels (smallest -1) must not be below 0"),
        (lambda: Dirichlet(1.0).partition([0.0, math.nan], 2), "NaN among them"),
        (lambda: Dirichlet(1.0).partition([[0], [1]], 2), "labels (shape (2, 1)) must be one"),
        (lambda: Partition(()), "shares (none) must be at least one"),
        (lambda: Partition(([0], [])), "share of worker 1 (shape (0,))"),  # type: ignore[arg-type]
        (lambda: Partition(([0, 1], [1])), "sample 1 must have one owner"),  # type: ignore[arg-type]
        (lambda: Partition(([-1], [1])), "share of worker 0 must hold"),  # type: ignore[arg-type]
        (lambda: Partition(([0.5], [1])), "share of worker 0 must hold"),  # type: ignore[arg-type]
        (lambda: Chunks().partition(4, 2).histogram([0, 1]), "labels (2) must cover every sample"),
        (lambda: Partition.from_dict({"schema": 2}), "a partition must have schema 1"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", '{"schema": 1, "shares": 5}', '{"schema": 1, "shares": null}']
)
def test_a_bad_file_is_named(tmp_path, text):
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"split\.json: "):
        Partition.load(path)
