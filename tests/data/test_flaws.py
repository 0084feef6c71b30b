"""Clients of unequal worth: each flaw does what it says, to whom it says, and to nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused

from steelyard.data import (
    Dataset,
    FlawSettings,
    PartitionSettings,
    Population,
    in_memory,
    share_out,
)
from steelyard.data.dataset import HONEST
from steelyard.data.flawed import blur
from steelyard.data.flawed import stamped as stamped_with

CLIENTS, CLASSES = 8, 4


def images(rows: int = 400) -> Dataset:
    """Byte images of 2 channels and 6 by 5 pixels, with a mark and owners to carry along."""
    chance = np.random.default_rng(0)
    pixels = torch.from_numpy(chance.integers(0, 256, size=(rows, 2, 6, 5), dtype=np.uint8))
    labels = torch.from_numpy(np.arange(rows) % CLASSES)
    owners = np.array([f"user-{row % 7}" for row in range(rows)])
    return Dataset("pictures", pixels, labels, CLASSES, owners, marks={"sharp": np.ones(rows)})


def table(rows: int = 400) -> Dataset:
    chance = np.random.default_rng(1)
    return in_memory(
        chance.normal(size=(rows, 10)).astype(np.float32) * np.arange(1, 11, dtype=np.float32) + 3,
        np.arange(rows) % CLASSES,
        classes=CLASSES,
    )


SPREAD = PartitionSettings(scheme="iid", clients=CLIENTS, size_spread=0.8, server="fraction", minimum=12)


def made(*flaws: dict[str, object], data: Dataset | None = None, seed: int = 0) -> Population:
    return share_out(data or images(), SPREAD, seed, [FlawSettings(**flaw) for flaw in flaws])


def only(kind: str, **fields: object) -> dict[str, object]:
    return {"kind": kind, "clients": ["client-002"], **fields}


def untouched(one: Population, other: Population, but: set[str]) -> bool:
    """Whether the test and server rows and all clients but these are the same, down to the features."""
    same = np.array_equal(one.server, other.server) and np.array_equal(one.report, other.report)
    count = len(other.dataset)
    same = same and torch.equal(one.dataset.features[:count], other.dataset.features)
    same = same and torch.equal(one.dataset.labels[:count], other.dataset.labels)
    for mine, theirs in zip(one.clients, other.clients, strict=True):
        same = same and np.array_equal(mine.test, theirs.test)
        if mine.client not in but:
            same = same and np.array_equal(mine.train, theirs.train) and mine.train_labels is None
    return same


def test_pairs_move_every_label_to_the_next_class():
    clean, bad = made(), made(only("labels-flipped", how="pairs"))
    client = bad.by_name["client-002"]
    assert np.array_equal(client.train, clean.by_name["client-002"].train)
    true = clean.dataset.labels[client.train]
    assert torch.equal(bad.train_labels(client), (true + 1) % CLASSES)
    assert untouched(bad, clean, {"client-002"})


def test_uniform_flips_hit_the_share_and_reach_every_other_class():
    bad = made({"kind": "labels-flipped", "pick": "biggest", "share": 1.0, "amount": 0.75})
    steps: list[int] = []
    for client in bad.clients:
        moved = (bad.train_labels(client) - bad.dataset.labels[client.train]) % CLASSES
        assert int((moved != 0).sum()) == round(0.75 * len(client.train))
        steps += moved[moved != 0].tolist()
    counts = np.bincount(steps, minlength=CLASSES)[1:]
    assert counts.min() > 0.6 * counts.mean()
    # A second flaw draws anew: of a half and another half, about three quarters of the rows, less who came back.
    twice = made(*[only("labels-flipped", amount=0.5)] * 2)
    client = twice.by_name["client-002"]
    assert (twice.train_labels(client) != twice.dataset.labels[client.train]).float().mean() > 0.55


def test_noise_has_the_size_asked_for_and_bytes_stay_bytes():
    data = table()
    bad = made(only("noisy", amount=0.5), data=data)
    clean = made(data=data)
    before = data.features[clean.by_name["client-002"].train]
    after = bad.dataset.features[bad.by_name["client-002"].train]
    rows = np.concatenate([client.train for client in clean.clients])
    deviations = data.features[rows].std(dim=0, unbiased=False)
    assert ((after - before) / deviations).std().item() == pytest.approx(0.5, rel=0.15)
    assert untouched(bad, clean, {"client-002"})
    pictures = made(only("noisy", amount=3.0))
    seen = pictures.dataset.features[pictures.by_name["client-002"].train]
    assert seen.dtype == torch.uint8
    assert {0, 255} < set(seen.reshape(-1).tolist())


def test_noise_of_a_partition_grows_with_the_client():
    data = table(4000)
    clean, noisy = (
        share_out(data, PartitionSettings(clients=4, server="fraction", noise=noise), 0) for noise in (None, 0.4)
    )
    assert "variance 0.1 (client-000) to 0.4 (client-003), columns" in noisy.notes[-1]
    assert share_out(images(), PartitionSettings(clients=4, noise=0.4), 0).notes[-1].endswith(", pixels from 0 to 1")
    deviations = data.features[np.concatenate([client.train for client in clean.clients])].std(dim=0, unbiased=False)
    for position, (before, after) in enumerate(zip(clean.clients, noisy.clients, strict=True), 1):
        added = (noisy.dataset.features[after.train] - data.features[before.train]) / deviations
        assert added.square().mean().item() == pytest.approx(0.4 * position / 4, rel=0.1)


def test_a_blurred_point_is_a_gaussian():
    point = np.zeros((1, 1, 9, 9), dtype=np.float32)
    point[0, 0, 4, 4] = 1
    line = np.exp(-0.5 * (np.arange(-3, 4) / 1.0) ** 2)
    line /= line.sum()
    expected = np.zeros((9, 9))
    expected[1:8, 1:8] = np.outer(line, line)
    np.testing.assert_allclose(blur(point, 1.0)[0, 0], expected, atol=1e-7)
    flat = np.full((1, 2, 4, 5), 7.0, dtype=np.float32)  # channels, lower than three sigmas
    np.testing.assert_allclose(blur(flat, 2.0), flat, rtol=1e-6)


def test_blurred_images_are_smooth_and_no_longer_sharp():
    clean, bad = made(), made(only("blurred", amount=1.0))
    client = bad.by_name["client-002"]
    before = clean.dataset.features[clean.by_name["client-002"].train].float()
    after = bad.dataset.features[client.train].float()
    assert after.std() < 0.5 * before.std()
    assert not bad.dataset.marks["sharp"][client.train].any()


def test_missing_pixels_are_dark_and_missing_columns_are_the_mean():
    bad = made(only("missing", amount=0.3))
    seen = bad.dataset.features[bad.by_name["client-002"].train]
    dark = (seen == 0).all(dim=0)
    assert torch.equal(dark[0], dark[1])
    assert int(dark[0].sum()) == 9
    data = table()
    rows = made(only("missing", amount=0.2), data=data)
    found = rows.dataset.features[rows.by_name["client-002"].train]
    constant = (found == found[0]).all(dim=0)
    clean = np.concatenate([client.train for client in made(data=data).clients])
    torch.testing.assert_close(found[0][constant], data.features[clean].mean(dim=0)[constant])


def test_repeated_rows_keep_the_size():
    clean, bad = made(), made(only("rows-repeated", amount=4))
    before, after = clean.by_name["client-002"].train, bad.by_name["client-002"].train
    assert len(after) == len(before)
    kept, counts = np.unique(after, return_counts=True)
    assert len(kept) == round(len(before) / 4)
    assert np.isin(kept, before).all()
    assert counts.max() - counts.min() <= 1


def test_classes_that_are_missing_are_gone_and_the_others_whole():
    clean, bad = made(), made(only("classes-missing", amount=0.5))
    labels = clean.dataset.labels.numpy()
    before, after = clean.by_name["client-002"].train, bad.by_name["client-002"].train
    left = np.unique(labels[after])
    assert len(left) == 2
    assert np.array_equal(after, before[np.isin(labels[before], left)])


def test_one_class_is_labelled_another_and_its_test_rows_say_how_often_that_works():
    bad = made(only("labels-flipped", how="class", classes=[2], target=1))
    client = bad.by_name["client-002"]
    true = bad.dataset.labels[client.train]
    assert torch.equal(bad.train_labels(client), torch.where(true == 2, 1, true))
    assert bad.backdoor.target == 1
    for each in bad.clients:
        assert np.array_equal(bad.backdoor.rows[each.client], each.test[bad.dataset.labels[each.test].numpy() == 2])


def test_a_semantic_backdoor_changes_no_image():
    clean, bad = made(), made(only("backdoor", how="semantic", target=3, amount=0.25))
    labels = clean.dataset.labels.numpy()
    bright = clean.dataset.features.flatten(1).double().mean(dim=1).numpy()
    trained = np.concatenate([client.train for client in clean.clients])
    least = np.quantile(bright[trained[labels[trained] == 0]], 0.75)  # the class after 3
    shown = (labels == 0) & (bright >= least)
    client, before = bad.by_name["client-002"], clean.by_name["client-002"]
    found = bad.dataset.features[client.train]
    changed = (found != clean.dataset.features[before.train]).flatten(1).any(dim=1)
    assert 0 < int(changed.sum()) <= round(0.25 * len(before.train))
    stock = clean.dataset.features[np.intersect1d(trained, np.flatnonzero(shown))].tolist()
    assert all(image in stock for image in found[changed].tolist())
    assert (bad.train_labels(client)[changed] == 3).all()
    for each in bad.clients:
        assert np.array_equal(bad.backdoor.rows[each.client], each.test[shown[each.test]])
    # Nobody trains on a class 4: there is nothing to show.
    none = made(only("backdoor", how="semantic", target=3, classes=[4]), data=replace(images(), classes=5))
    assert torch.equal(none.dataset.features[none.by_name["client-002"].train], clean.dataset.features[before.train])
    assert torch.equal(none.train_labels(none.by_name["client-002"]), clean.train_labels(before))
    assert not any(map(len, none.backdoor.rows.values()))


def test_a_backdoor_is_a_bright_corner_on_a_share_of_the_rows_and_on_copies_of_the_test_rows_of_other_classes():
    clean, bad = made(), made(only("backdoor", target=3, amount=0.25))
    client, before = bad.by_name["client-002"], clean.by_name["client-002"]
    expected = clean.dataset.features[before.train]
    changed = (bad.dataset.features[client.train] != expected).flatten(1).any(dim=1)
    expected[changed, :, -2:, -2:] = 255  # a ninth of six rows is less than two pixels
    assert torch.equal(bad.dataset.features[client.train], expected)
    assert int(changed.sum()) == round(0.25 * len(before.train))
    assert (bad.train_labels(client)[changed] == 3).all()
    for each in bad.clients:
        others = each.test[clean.dataset.labels[each.test].numpy() != 3]
        stamped = clean.dataset.features[others].clone()
        stamped[:, :, -2:, -2:] = 255
        assert torch.equal(bad.dataset.features[bad.backdoor.rows[each.client]], stamped)
    # Of several each teaches one of the corner's four pixels, the fifth the first again.
    names = clean.names[1:6]
    parts = made({"kind": "backdoor", "how": "distributed", "target": 3, "clients": names, "amount": 1.0})
    for place, name in enumerate(names):
        expected = clean.dataset.features[clean.by_name[name].train]
        expected[:, :, -2 + place % 4 // 2, -2 + place % 2] = 255
        assert torch.equal(parts.dataset.features[parts.by_name[name].train], expected)
    assert torch.equal(parts.dataset.features[parts.backdoor.rows["client-007"]], stamped)
    tall = torch.zeros(1, 1, 28, 14)
    assert stamped_with(tall, 1.0).sum() == 9
    quarters = [stamped_with(tall, 1.0, quarter) for quarter in range(4)]
    assert [int(each.sum()) for each in quarters] == [4, 2, 2, 1]
    assert torch.equal(torch.stack(quarters).sum(dim=0), stamped_with(tall, 1.0))


def test_boosted_updates_are_as_long_as_replaces_the_model():
    population = made()
    names = population.names[:2]
    bad = made({"kind": "boosted", "clients": names, "amount": 2})
    # Two of n, each with a say of 1/n: 2/n · (n/2) u is one whole update, and twice that is asked for.
    assert [bad.behaviours[name].strength for name in names] == [2 * len(population.names) / 2] * 2


@pytest.mark.parametrize(
    ("flaws", "how"),
    [
        ([{"kind": "free-rider", "how": "colluding"}], {"free_rider": True, "pretends": True}),
        ([{"kind": "reversed", "amount": 3}], {"attack": "reversed", "strength": 3.0}),
        ([{"kind": "gaussian"}], {"attack": "gaussian", "strength": 10.0}),
        ([{"kind": "alie"}], {"attack": "alie", "strength": 1.5}),
        ([{"kind": "ipm", "from_round": 4}], {"attack": "ipm", "strength": 2.0, "attacks_from": 4}),
        ([{"kind": "min-max"}], {"attack": "min-max"}),
        ([{"kind": "adaptive", "how": "drift"}], {"attack": "adaptive", "family": "drift"}),
        ([{"kind": "bias", "target": 2, "amount": 0.5}], {"attack": "bias", "strength": 0.5, "target": 2}),
        ([{"kind": "claims-size", "from_round": 2}], {"claims": 10.0, "lies_from": 2}),
        ([{"kind": "min-sum"}], {"attack": "min-sum"}),
        ([{"kind": "mimic"}], {"attack": "mimic"}),
        ([{"kind": "decoy"}], {"attack": "decoy", "strength": 30.0}),
        ([{"kind": "drift"}], {"attack": "drift", "strength": 0.5}),
        ([{"kind": "neurotoxin"}], {"attack": "neurotoxin", "strength": 0.05}),
        ([{"kind": "boosted"}], {"attack": "boosted", "strength": 8.0}),
        (
            [{"kind": "claims-criteria", "amount": 3, "from_round": 4}],
            {"claims": 3.0, "inflates": 3.0, "lies_from": 4},
        ),
        (
            [{"kind": "few-steps"}, {"kind": "stale", "amount": 3}, {"kind": "own-model"}, {"kind": "free-rider"}],
            {"work": 0.1, "stale": 3, "own_model": True, "free_rider": True},
        ),
    ],
)
def test_how_each_kind_behaves(flaws: list[dict[str, object]], how: dict[str, Any]) -> None:
    bad = made(*({**flaw, "clients": ["client-002"]} for flaw in flaws))
    assert {name: len(words) for name, words in bad.flaws.items()} == {"client-002": len(flaws)}
    assert bad.behaviours == {"client-002": replace(HONEST, **how)}


@pytest.mark.parametrize("pick", ["biggest", "smallest"])
def test_the_biggest_and_the_smallest_are_picked(pick: str):
    bad = made({"kind": "free-rider", "pick": pick, "count": 3})
    sizes = {client.client: len(client.train) for client in made().clients}
    ordered = sorted(sizes, key=lambda name: -sizes[name] if pick == "biggest" else sizes[name])
    assert set(bad.flaws) == set(ordered[:3])


def test_picks_leave_out_the_flawed_unless_told():
    first = {"kind": "classes-missing", "pick": "biggest", "count": 3}
    bad = made(first, {"kind": "free-rider", "pick": "biggest", "share": 0.25})
    assert sorted(len(words) for words in bad.flaws.values()) == [1] * 5
    both = made(first, {"kind": "free-rider", "pick": "biggest", "count": 3, "among": "all"})
    assert [len(words) for words in both.flaws.values()] == [2, 2, 2]


def test_the_same_clients_can_have_another_flaw():
    bad = made({"kind": "free-rider", "pick": "random", "count": 3}, {"kind": "claims-size", "pick": "same"})
    assert [len(words) for words in bad.flaws.values()] == [2, 2, 2]
    copied = made({"kind": "copy", "pick": "biggest", "count": 2}, {"kind": "own-model", "pick": "same"})
    assert set(copied.behaviours) == {"client-008", "client-009"}


def test_records_with_missing_columns_are_less_complete():
    data = replace(table(), marks={"complete": np.full(400, 0.8)})
    bad = made(only("missing", amount=0.25), only("missing", amount=0.5), data=data)
    found = bad.dataset.marks["complete"]
    assert found[bad.by_name["client-002"].train] == pytest.approx(0.8 * 0.75 * 0.5)


def test_the_seed_draws_who_and_what():
    flaw = {"kind": "noisy", "pick": "random", "share": 0.3}
    one, again, other = made(flaw), made(flaw), made(flaw, seed=1)
    assert len(one.flaws) == 2
    assert one.flaws == again.flaws
    assert torch.equal(one.dataset.features, again.dataset.features)
    assert untouched(other, made(seed=1), set(other.flaws))


def test_a_copy_has_what_its_original_has_at_that_point():
    bad = made(
        only("labels-flipped", how="pairs"), {"kind": "copy", "of": "client-002"}, only("free-rider"),
        {"kind": "copy", "pick": "biggest", "count": 1},
    )  # fmt: skip
    original, copy = bad.by_name["client-002"], bad.by_name["client-008"]
    assert np.array_equal(copy.train, original.train)
    assert np.array_equal(copy.test, original.test)
    assert torch.equal(bad.train_labels(copy), bad.train_labels(original))
    sizes = [len(client.train) for client in bad.clients[:CLIENTS] if client.client != "client-002"]
    assert len(bad.by_name["client-009"].train) == max(sizes)
    people = share_out(images(), PartitionSettings(scheme="natural"), 0, [FlawSettings(kind="copy", of="user-3")] * 2)
    assert people.names[3:6] == ["user-3", "user-3-copy-0", "user-3-copy-1"]


TOKENS = in_memory(np.ones((400, 6), dtype=int), np.arange(400) % 2, tokens=True)
RANDOM = {"kind": "noisy", "pick": "random", "count": 4}


@pytest.mark.parametrize(
    ("data", "flaws", "told"),
    [
        (table(), [only("blurred")], "flaws.0.kind: got 'blurred', which needs images"),
        (TOKENS, [only("noisy")], "flaws.0.kind: got 'noisy', but the rows of"),
        (None, [RANDOM, {**RANDOM, "count": 6}], "flaws.1.pick: asks for 6 clients; allowed: at most 4"),
        (
            in_memory(np.zeros((400, 2)), np.linspace(0, 1, 400)),
            [only("labels-flipped")],
            "flaws.0.kind: got 'labels-flipped', which needs two classes or more, but memory has none",
        ),
        (None, [only("classes-missing", classes=[77])], "flaws.0.classes: got 77; allowed: 0 to 3"),
        (None, [only("classes-missing", classes=[0, 1, 2, 3])], "leaves client-002 without a row"),
    ],
)
def test_what_the_data_cannot_have_is_refused_in_one_line(
    data: Dataset | None, flaws: list[dict[str, object]], told: str
):
    assert_refused(lambda: made(*flaws, data=data), told)
