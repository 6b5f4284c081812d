"""Draws are pure functions of a key, have the stated distribution, and are the same under vmap.

Statistical tests have a fixed seed and a stated bound: 5 standard deviations, or the 99.9% quantile
of chi-square.
"""

from collections import Counter
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedbilevel.core.rng import (
    bits,
    fold_in,
    fold_in_each,
    fold_in_ranges,
    integers,
    normal,
    root,
    root_number,
    rows,
    subset,
    uniform,
)

KEY = root(7, "test")
CHI2_999 = {4: 18.467, 9: 27.877, 10: 29.588}  # degrees of freedom: quantile
int64 = st.integers(-(2**63), 2**63 - 1)

# Every draw that works on a tensor of keys, as a function of keys alone.
DRAWS = {
    "fold_in": lambda key: fold_in(key, 3),
    "bits": lambda key: bits(key, 5),
    "uniform, float32": lambda key: uniform(key, (2, 3)),
    "uniform, float64": lambda key: uniform(key, (2, 3), torch.float64),
    "normal, float32": lambda key: normal(key, (4,)),
    "normal, float64": lambda key: normal(key, (4,), torch.float64),
    "integers": lambda key: integers(key, -3, 900),
}


def keys(count, purpose="test"):
    return fold_in(root(7, purpose), torch.arange(count))


def chi_square(observed, expected):
    return sum((o - expected) ** 2 / expected for o in observed)


def splitmix64(seed, count):
    """The published generator in Python's integers."""
    words = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        words.append(z ^ (z >> 31))
    return words


@settings(deadline=None, max_examples=50)
@given(int64, st.integers(1, 6))
def test_bits_are_splitmix64(key, count):
    words = [word % 2**64 for word in bits(torch.tensor(key), count).tolist()]
    assert words == splitmix64(key % 2**64, count)


def test_published_values():
    words = [word % 2**64 for word in bits(torch.tensor(0), 2).tolist()]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert bits(torch.tensor(1234567), 2).tolist() == [6457827717110365317, 3203168211198807973]


def test_pinned_values():
    """A change of any of these changes every run ever made."""
    assert root(0, "cohort").item() == -2638440607767471136
    assert fold_in(root(0, "cohort"), 5).item() == -2367207789098686351
    assert uniform(KEY, (2,)).tolist() == [0.41196370124816895, 0.6539459228515625]
    assert uniform(KEY, (2,), torch.float64).tolist() == [0.4119637605329981, 0.6539459348111377]
    torch.testing.assert_close(
        normal(KEY, (2,), torch.float64),
        torch.tensor([-0.3741781575482675, -0.5652013721351752], dtype=torch.float64),
    )
    assert integers(KEY, 1, 1000).item() == 535
    assert subset(KEY, 10**12, 2) == [77332895308, 770135148036]
    assert rows(keys(2), 9, 3, torch.tensor([9, 5])).tolist() == [[3, 5, 4], [3, 2, 1]]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_same_key_same_bits(draw):
    assert torch.equal(draw(root(3, "a")), draw(root(3, "a")))
    assert not torch.equal(draw(root(3, "a")), draw(root(4, "a")))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_stack_of_keys_draws_what_each_key_draws(draw):
    stack = keys(6)
    alone = torch.stack([draw(key) for key in stack])
    assert torch.equal(vmap(draw)(stack), alone)
    assert torch.equal(draw(stack), alone)


def test_rows_under_vmap():
    stack = keys(12).reshape(4, 3)
    sizes = torch.tensor([4, 9, 6])
    alone = torch.stack([rows(some, 9, 3, sizes) for some in stack])
    assert torch.equal(vmap(lambda some: rows(some, 9, 3, sizes))(stack), alone)


def test_streams_share_no_word():
    """All seeds, purposes, folded numbers and numbers folded twice draw different words."""
    pairs = product((0, 1, 2**40), ("cohort", "descend", "a", "b"))
    streams = [root(seed, purpose) for seed, purpose in pairs]
    folded = fold_in(torch.stack(streams).unsqueeze(-1), torch.arange(30))
    twice = fold_in(folded.unsqueeze(-1), torch.arange(4))
    every = torch.cat([torch.stack(streams), folded.flatten(), twice.flatten()])
    words = bits(every, 8).flatten()
    assert len(every) == 12 * (1 + 30 + 120)
    assert len(words.unique()) == len(words)


@pytest.mark.parametrize("count", [1, 8, 9, 30])  # one by one, and as an array
def test_keys_as_plain_numbers_are_those_of_tensors(count):
    roots = keys(count)
    numbers = torch.arange(count) * 10**15 - 5
    clients = torch.arange(count, 0, -1)
    columns = roots.tolist(), numbers.tolist(), clients.tolist()
    assert fold_in_each(*columns) == fold_in(roots, numbers, clients).tolist()
    assert root_number(7, "test") == int(root(7, "test"))


@pytest.mark.parametrize("ranges", [(range(2, 3), range(4), range(1)), (range(3), range(9))])
def test_keys_of_ranges_are_those_of_their_numbers(ranges):
    for roots in (root(7, "test"), keys(1), keys(2)):
        derived = fold_in_ranges(roots, *ranges)
        assert derived.shape == (*map(len, ranges), *roots.shape)
        expected = torch.stack([fold_in(roots, *numbers) for numbers in product(*ranges)])
        assert torch.equal(derived, expected.view(derived.shape))


def test_folding_does_not_commute():
    assert fold_in(fold_in(KEY, 1), 2) != fold_in(fold_in(KEY, 2), 1)


def test_neighbouring_streams_are_uncorrelated():
    """Neighbouring keys and neighbouring words.

    The correlation of N independent pairs has the standard deviation 1 / sqrt(N).
    """
    draws = uniform(keys(300), (300,), torch.float64) - 0.5
    for left, right in [(draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])]:
        assert abs(float((left * right).mean()) * 12) <= 5 / left.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_folding_a_tensor_is_folding_its_number(dtype):
    for number in (0, 5, -1, 2**31 - 1, -(2**31)):
        folded = fold_in(KEY, torch.tensor(number, dtype=dtype))
        assert folded == fold_in(KEY, number)
        assert folded.shape == ()


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("key", [KEY, keys(3)], ids=["one key", "three keys"])
def test_shape_of_a_single_number(draw, key):
    assert torch.equal(draw(key, ()), draw(key, (1,))[..., 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_distribution(dtype):
    n = 200_000
    u = uniform(KEY, (n,), dtype)
    assert u.dtype == dtype
    assert u.min() >= 0
    assert u.max() < 1
    u = u.double()
    assert abs(u.mean() - 1 / 2) <= 5 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) <= 5 * (1 / 180 / n) ** 0.5
    cells = torch.histc(u, 10, 0, 1).tolist()
    assert chi_square(cells, n / 10) <= CHI2_999[9]


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.float32, 24), (torch.float64, 53)])
def test_uniform_uses_the_whole_mantissa(dtype, mantissa):
    """Every draw is a multiple of 2^-mantissa; half of them are odd multiples."""
    scaled = uniform(KEY, (10_000,), dtype).double() * 2.0**mantissa
    assert torch.equal(scaled, scaled.round())
    assert abs((scaled % 2).mean() - 1 / 2) <= 5 * (1 / 4 / 10_000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_moments(dtype):
    n = 200_000
    z = normal(KEY, (n,), dtype)
    assert z.dtype == dtype
    z = z.double()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) <= 5 * (variance / n) ** 0.5
    assert 4 < z.abs().max() < 6


def test_integers_are_uniform_and_cover_both_ends():
    n, low, high = 22_000, -3, 7
    counts = Counter(integers(keys(n), low, high).tolist())
    assert sorted(counts) == list(range(low, high + 1))
    assert chi_square(counts.values(), n / 11) <= CHI2_999[10]


def test_integers_of_one_value():
    assert integers(keys(5), 4, 4).tolist() == [4] * 5


@settings(deadline=None, max_examples=60)
@given(int64, st.integers(1, 40), st.data())
def test_subset_is_distinct_and_in_range(key, population, data):
    count = data.draw(st.integers(0, population))
    chosen = subset(torch.tensor(key), population, count)
    assert len(set(chosen)) == len(chosen) == count
    assert all(0 <= client < population for client in chosen)


def test_all_subsets_are_equally_likely():
    """All 10 pairs of 5, hence each of the 5 too; the first of a pair is uniform, too."""
    n = 10_000
    pairs = [subset(key, 5, 2) for key in keys(n)]
    counts = Counter(tuple(sorted(pair)) for pair in pairs)
    assert sorted(counts) == list(combinations(range(5), 2))
    assert chi_square(counts.values(), n / 10) <= CHI2_999[9]
    assert chi_square(Counter(first for first, _ in pairs).values(), n / 5) <= CHI2_999[4]


def test_subset_of_all_but_one_leaves_out_each_equally_often():
    n = 2000
    left_out = Counter(10 - sum(subset(key, 5, 4)) for key in keys(n))  # 0 + 1 + 2 + 3 + 4 = 10
    assert sorted(left_out) == list(range(5))
    assert chi_square(left_out.values(), n / 5) <= CHI2_999[4]


def test_subset_of_everyone_is_in_order():
    assert subset(KEY, 6, 6) == list(range(6))


def test_subset_of_a_huge_population(monkeypatch):
    """The number of words drawn is the same for 10^12 clients as for 10^4."""
    drawn = []

    def counted_bits(key, count):
        drawn.append(count)
        return bits(key, count)

    monkeypatch.setattr("fedbilevel.core.rng.bits", counted_bits)
    chosen = {population: subset(KEY, population, 10) for population in (10**4, 10**12)}
    assert drawn == [20, 20]
    assert len(set(chosen[10**12])) == 10
    assert max(chosen[10**12]) > 10**11


@settings(deadline=None, max_examples=60)
@given(int64, st.lists(st.integers(1, 30), min_size=1, max_size=5), st.data())
def test_rows_are_distinct_and_below_each_size(seed, sizes, data):
    count = data.draw(st.integers(1, min(sizes)))
    drawn = rows(
        fold_in(torch.tensor(seed), torch.arange(len(sizes))),
        max(sizes),
        count,
        torch.tensor(sizes),
    )
    assert drawn.shape == (len(sizes), count)
    for row, size in zip(drawn.tolist(), sizes, strict=True):
        assert len(set(row)) == count
        assert all(0 <= index < size for index in row)


@pytest.mark.parametrize("sizes", [[5, 5, 5], [3, 5, 10]], ids=["equal", "unequal"])
def test_rows_are_uniform(sizes):
    """In every position of a batch, all indices below the client's size are equally likely."""
    n = 3000
    drawn = rows(keys(3 * n), max(sizes), 2, torch.tensor(sizes * n)).reshape(n, 3, 2)
    for client, size in enumerate(sizes):
        for position in range(2):
            counts = torch.bincount(drawn[:, client, position], minlength=size).tolist()
            assert len(counts) == size
            spread = (n / size * (1 - 1 / size)) ** 0.5
            assert all(abs(count - n / size) <= 5 * spread for count in counts)
        order = (drawn[:, client, 0] < drawn[:, client, 1]).double().mean()
        assert abs(order - 1 / 2) <= 5 * (1 / 4 / n) ** 0.5


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for draw in DRAWS.values():
        draw(KEY)
    subset(KEY, 100, 3)
    rows(keys(2), 6, 2, torch.tensor([4, 6]))
    assert torch.equal(torch.get_rng_state(), before)
