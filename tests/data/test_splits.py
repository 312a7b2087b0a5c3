"""Splits against the rule of the protocol, carried out literally on Python lists."""

import hashlib

import numpy as np
import pytest

from aidgn.data.splits import train_val_indices


def literal(n, trial, domain):
    digest = hashlib.md5(str((trial, domain)).encode("utf-8")).hexdigest()
    keys = list(range(n))
    np.random.RandomState(int(digest, 16) % (2**31)).shuffle(keys)
    held_out = int(n * 0.2)
    return keys[held_out:], keys[:held_out]


@pytest.mark.parametrize("n", [1, 4, 5, 9, 15, 35, 1670, 2048, 2344, 3929])
@pytest.mark.parametrize(("trial", "domain"), [(0, 0), (0, 3), (2, 1)])
def test_split_is_the_protocols(n, trial, domain):
    inside, outside = train_val_indices(n, trial, domain)
    expected_inside, expected_outside = literal(n, trial, domain)
    assert inside.tolist() == expected_inside
    assert outside.tolist() == expected_outside


def test_split_has_every_position_once_and_a_fifth_held_out():
    inside, outside = train_val_indices(2344, 1, 2)
    assert len(outside) == 468  # floor(0.2 * 2344)
    assert sorted([*inside, *outside]) == list(range(2344))


def test_split_depends_on_trial_and_domain_only():
    assert train_val_indices(100, 0, 1)[0].tolist() == train_val_indices(100, np.int64(0), np.int64(1))[0].tolist()
    assert train_val_indices(100, 0, 1)[0].tolist() != train_val_indices(100, 1, 0)[0].tolist()
    state = np.random.get_state()[1].copy()
    train_val_indices(100, 0, 1)
    assert (np.random.get_state()[1] == state).all()  # the global generator is left alone


def test_split_of_nothing():
    assert [len(part) for part in train_val_indices(0, 0, 0)] == [0, 0]


def test_groups_stay_together() -> None:
    rng = np.random.default_rng(0)
    for trial in range(20):
        count = int(rng.integers(20, 400))
        groups = rng.integers(0, count // 4, count)
        train, val = train_val_indices(count, trial, 1, groups)
        assert sorted([*train, *val]) == list(range(count))
        assert not {*groups[train]} & {*groups[val]}
        assert 0.1 * count < len(val) <= 0.2 * count
        shuffled = np.concatenate(train_val_indices(count, trial, 1)[::-1])
        assert train.tolist() == [place for place in shuffled if groups[place] not in groups[val]]


def test_groups_of_one_image_split_as_without() -> None:
    for part, expected in zip(train_val_indices(57, 3, 2, np.arange(57)), train_val_indices(57, 3, 2), strict=True):
        assert part.tolist() == expected.tolist()


def test_few_large_groups() -> None:
    assert len(train_val_indices(30, 0, 0, np.repeat([0, 1, 2], [12, 8, 10]))[1]) == 8  # the smallest
    assert len(train_val_indices(30, 0, 0, np.zeros(30, np.int64))[1]) == 0
    train, _ = train_val_indices(30, 0, 0, np.repeat([-1, 1, 2], 10))
    assert {*range(10)} <= {*train.tolist()}  # -1 is for training
