"""A round of secure aggregation with liars in it: who is left out, what is tried again, and what must not be opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.privacy.fixed_point import FixedPoint
from steelyard.privacy.hidden import BeyondBound, Summed, check_sum
from steelyard.privacy.secure_client import KEY_SHARES_BYTES, Opened, PublicKeys, SecureClient, Unreadable, Withdrawn
from steelyard.privacy.secure_round import MOST_TRIES, HiddenWords, blame, secure_sum
from steelyard.privacy.secure_server import SecureServer, Unopened
from steelyard.privacy.settings import FEWEST, AggregationSettings

SETTINGS = AggregationSettings()
SIZE = 5


class Cohort:
    """Clients and server without a network. `garbled` send key shares that nobody (or only some) can read, `liars` say
    that they cannot read those of others, `excess` is what a client adds to what it hides."""

    def __init__(
        self,
        names: str,
        garbled: Mapping[str, str] | None = None,
        liars: Mapping[str, str] | None = None,
        excess: Mapping[str, float] | None = None,
        gone_later: str = "",
    ) -> None:
        self.names, self.garbled, self.liars, self.excess = names, garbled or {}, liars or {}, excess or {}
        self.gone_later = gone_later
        self.updates = {n: np.random.default_rng(ord(n)).uniform(-1, 1, SIZE) for n in names}
        self.sent: dict[str, int] = {}
        self.tries: list[dict[str, SecureClient]] = []
        self.words: list[dict[str, np.ndarray]] = []
        self.opened: list[tuple[int, tuple[str, ...]]] = []
        self._begin(names, FEWEST)

    def _begin(self, names: Sequence[str], fewest: int) -> None:
        context = f"try {len(self.tries)}".encode()
        self.clients = {name: SecureClient(name, context, SETTINGS, fewest=fewest) for name in names}
        self.tries.append(self.clients)
        self.server = SecureServer(context, SETTINGS, "round 1 of test", fewest=fewest)
        assert self.server.admit({name: client.keys() for name, client in self.clients.items()}) == {}
        self.withdrawn: dict[str, str] = {}
        for name, client in self.clients.items():
            try:
                shares = client.share(self.server.keys)
            except Withdrawn as reason:
                self.withdrawn[name] = str(reason)
                continue
            spoiled = dict.fromkeys(set(self.garbled.get(name, "")) & set(shares), bytes(KEY_SHARES_BYTES))
            self.server.keep_shares(name, {**shares, **spoiled})

    def again(self, clients: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        self._begin([name for name in clients if name not in self.gone_later], self.server.least)
        gone = {name: "its node is gone" for name in clients if name in self.gone_later}
        return tuple(name for name in self.clients if name not in self.withdrawn), gone | self.withdrawn

    def hide(self, members: Sequence[str], weights: Mapping[str, float]) -> HiddenWords:
        encoding = FixedPoint.of(SETTINGS.word_bits, SETTINGS.bound, len(self.server.keys))
        words: dict[str, np.ndarray] = {}
        unreadable: dict[str, list[str]] = {}
        for name in members:
            try:
                self.clients[name].receive(members, self.server.shares_for(name, members))
            except Unreadable as error:
                unreadable[name] = list(error.senders)
                continue
            if lies := set(self.liars.get(name, "")) & set(members):
                unreadable[name] = sorted(lies)
                continue
            plain = encoding.encode(self.updates[name] * weights[name])
            extra = np.int64(self.excess.get(name, 0.0) * 2.0**encoding.places).astype(encoding.dtype)
            words[name] = self.clients[name].mask(plain + extra)
        self.words.append(words)
        total = np.sum(list(words.values()), axis=0, dtype=encoding.dtype) if words else np.zeros(SIZE, np.uint32)
        return HiddenWords(total, tuple(words), {}, unreadable)

    def open(self, members: Sequence[str], survivors: Sequence[str]) -> dict[str, Opened]:
        self.opened.append((len(self.tries), tuple(survivors)))
        return {name: self.clients[name].open(survivors) for name in survivors}

    def sum(self, weights: Sequence[float] | None = None) -> Summed:
        given = np.full(len(self.names), 1 / len(self.names)) if weights is None else np.array(weights)
        return secure_sum(self, tuple(self.names), given, SETTINGS)


def test_one_client_whose_key_shares_nobody_can_read_is_named_and_the_other_nine_are_summed():
    names = "abcdefghij"
    weights = [number / 55 for number in range(1, 11)]
    cohort = Cohort(names, garbled={"d": names})
    summed = cohort.sum(weights)
    assert summed.clients == tuple("abcefghij")
    assert [(failure.client, failure.reason) for failure in summed.dropped] == [
        ("d", "left out: sent key shares that a, b, c, e, f and 4 more cannot read")
    ]
    # The weights are those that were given, so that the sum is that of a client that dropped out.
    expected = np.sum([w * cohort.updates[n] for n, w in zip(names, weights, strict=True) if n != "d"], axis=0)
    np.testing.assert_allclose(summed.total, expected, atol=9 * summed.step)
    assert cohort.opened == [(2, tuple("abcefghij"))]  # once, in the second try


def test_a_second_try_has_fresh_keys_and_the_first_can_no_longer_be_opened():
    names = "abcdef"
    cohort = Cohort(names, garbled={"f": "ab"})
    summed = cohort.sum()
    assert summed.clients == tuple("abcde")
    first, second = cohort.tries
    for name in "abcde":
        old, new = first[name].keys(), second[name].keys()
        assert not {old.channel, old.mask, old.seed} & {new.channel, new.mask, new.seed}
    # Whoever hid words in the first try hid the same update again, and nothing of it is seen in the difference.
    for name in set(cohort.words[0]) & set(cohort.words[1]):
        assert (cohort.words[0][name] != cohort.words[1][name]).all()
    assert cohort.opened == [(2, tuple("abcde"))]
    with pytest.raises(Withdrawn, match="before its update was hidden"):
        first["a"].open("abcde")  # it withdrew from the first try


@pytest.mark.parametrize(
    ("garbled", "liars", "left"),
    [
        ({}, {"c": "abdefghij"}, "c"),  # one that says so of all others
        ({}, {"c": "a"}, "ac"),  # one against one: nobody can tell who lies, so the liar pays as well
        ({"c": "abdefghij", "g": "abcdefhij"}, {}, "cg"),
        ({"c": "ab"}, {}, "c"),
        ({"c": "abdefghij"}, {"g": "a"}, "acg"),
    ],
)  # fmt: skip
def test_who_is_in_most_complaints_is_left_out_and_both_where_nobody_can_tell(
    garbled: dict[str, str], liars: dict[str, str], left: str
):
    summed = Cohort("abcdefghij", garbled, liars).sum()
    assert [failure.client for failure in summed.dropped] == list(left)
    assert summed.clients == tuple(n for n in "abcdefghij" if n not in left)


def test_those_who_lie_only_in_later_tries_are_left_out_one_after_the_other_but_not_for_ever():
    class Serial(Cohort):
        """In each try another client spoils its key shares."""

        def _begin(self, names: Sequence[str], fewest: int) -> None:
            self.garbled = {names[0]: "".join(names)}
            super()._begin(names, fewest)

    names = "abcdefghijklmnopqrst"
    cohort = Serial(names)
    with pytest.raises(Unopened, match=r"1 of 17 clients sent their hidden update \(a: left out"):
        cohort.sum()
    assert len(cohort.tries) == MOST_TRIES
    assert cohort.opened == []


def test_as_many_must_stay_as_in_the_first_try():
    """Of ten clients seven must stay; of eight alone it would be six."""
    names = "abcdefghij"
    spoiled = {"a": names, "b": names}
    summed = Cohort(names, garbled=spoiled, gone_later="c").sum()
    assert summed.clients == tuple("defghij")
    reasons = {failure.client: failure.reason for failure in summed.dropped}
    assert reasons["c"] == "dropped out before its update arrived: its node is gone"
    gone = Cohort(names, garbled=spoiled, gone_later="cd")
    with pytest.raises(Unopened, match=r"0 of 6 clients shared fresh keys .*it takes 7"):
        gone.sum()
    four = Cohort(names, garbled=dict.fromkeys("abcd", names))
    with pytest.raises(Unopened, match=r"0 of 10 clients sent their hidden update"):
        four.sum()  # six would be left, so that it is not tried again
    assert len(four.tries) == 1
    assert gone.opened == four.opened == []


def test_a_client_s_own_reckoning_holds_the_threshold_of_the_first_try():
    clients = {name: SecureClient(name, b"again", SETTINGS, fewest=7) for name in "abcdefgh"}
    keys = {name: client.keys() for name, client in clients.items()}
    with pytest.raises(Withdrawn, match="6 clients in the round; allowed: at least 7"):
        clients["a"].share({name: keys[name] for name in "abcdef"})
    shares = {name: client.share(keys) for name, client in clients.items()}
    received = {name: shares[name]["a"] for name in "bcdefgh"}
    with pytest.raises(Withdrawn, match="6 clients go on; allowed: at least 7"):
        clients["a"].receive("abcdef", received)
    assert SecureClient.load(clients["a"].dump()).least == 7
    clients["a"].receive("abcdefgh", received)
    with pytest.raises(Withdrawn, match="6 clients are left; allowed: at least 7"):
        clients["a"].open("abcdef")


def test_each_stage_at_which_a_round_is_given_up_is_named():
    ending = " to open a sum (privacy.aggregation.threshold); allowed: resume the run when more clients are there"
    few = Cohort("abcdef")
    with pytest.raises(Unopened) as found:
        secure_sum(few, tuple("abc"), np.full(3, 1 / 3), SETTINGS)
    said = "round 1 of test: 3 of 6 clients shared their keys and can be weighed, and it takes 4"
    assert str(found.value) == said + ending

    class Silent(Cohort):
        """Nobody's words arrive, and nobody says why; then as few do as are not enough."""

        arrived = ""

        def hide(self, members: Sequence[str], weights: Mapping[str, float]) -> HiddenWords:
            hidden = super().hide(members, weights)
            return HiddenWords(hidden.total, tuple(self.arrived) or (), {}, {})

    silent = Silent("abcdef")
    with pytest.raises(Unopened) as found:
        silent.sum()
    gone = ", ".join(f"{name}: dropped out before its update arrived" for name in "abc")
    said = f"round 1 of test: 0 of 6 clients sent their hidden update ({gone} and 3 more), and it takes 4"
    assert str(found.value) == said + ending


def test_where_too_few_would_be_left_the_round_goes_on_without_those_who_withdrew():
    """Of four three must stay: leaving out both ends of the complaint would leave two."""
    cohort = Cohort("abcd", garbled={"c": "a"})
    summed = cohort.sum()
    assert summed.clients == tuple("bcd")
    assert [(f.client, f.reason) for f in summed.dropped] == [("a", "dropped out before its update arrived")]
    assert cohort.opened == [(1, tuple("bcd"))]


def test_a_client_of_small_weight_that_moves_every_parameter_by_200_is_noticed():
    weights = [0.01, *[0.11] * 9]
    summed = Cohort("abcdefghij", excess={"a": 200.0}).sum(weights)
    assert summed.total.min() > 190  # this is what used to be added to the model
    with pytest.raises(BeyondBound, match=r"by 20\d, .*at most 16 .*one or more of a, b, c, d, e, f, g, h, i, j"):
        check_sum(summed, 1.0, SETTINGS)
    honest = Cohort("abcdefghij").sum(weights)
    check_sum(honest, 1.0, SETTINGS)


names_of = st.sampled_from("abcdefgh")


@given(st.dictionaries(names_of, st.lists(names_of, max_size=7)))
def test_after_leaving_out_nobody_is_left_who_cannot_read_another(found: dict[str, list[str]]):
    unreadable = {receiver: [sender for sender in senders if sender != receiver] for receiver, senders in found.items()}
    out = blame(unreadable)
    assert not [(r, s) for r, senders in unreadable.items() for s in senders if r not in out and s not in out]
    named = {name for receiver, senders in unreadable.items() if senders for name in (receiver, *senders)}
    assert set(out) <= named


@given(st.integers(3, 12), st.data())
def test_one_liar_costs_at_most_one_honest_client(count: int, data: st.DataObject):
    """Whatever it does to whomever, as sender and as receiver at once."""
    names = [f"client-{number}" for number in range(count)]
    liar, honest = names[0], names[1:]
    some = st.lists(st.sampled_from(honest), unique=True)
    victims, accused = data.draw(some), data.draw(some)
    out = blame({**{victim: [liar] for victim in victims}, liar: accused})
    assert (liar in out) == bool(victims or accused)
    assert len(set(out) - {liar}) <= 1


def test_keys_that_would_make_all_others_withdraw_are_left_out_with_their_owners():
    clients = {name: SecureClient(name, b"x", SETTINGS) for name in "abcdef"}
    shown = {name: client.keys() for name, client in clients.items()}
    shown["b"] = PublicKeys(shown["b"].channel, shown["b"].channel, shown["b"].seed)
    shown["c"] = PublicKeys(bytes(32), shown["c"].mask, shown["c"].seed)
    shown["d"] = PublicKeys(shown["e"].mask, shown["d"].mask, shown["d"].seed)
    server = SecureServer(b"x", SETTINGS, "round 1 of test")
    refused = server.admit(shown)
    assert sorted(server.keys) == ["a", "f"]
    assert refused["c"] == "its key is not a valid key"
    twice = "shows the same key twice, or one that another client shows"
    assert {name: refused[name] for name in "bde"} == dict.fromkeys("bde", twice)


def test_reasons_name_both_ends_of_complaints():
    found = blame({"a": ["b", "c"], "d": ["a"]})
    assert found["a"] == (
        "left out: sent key shares that d cannot read and says that it cannot read the key shares of b, c"
    )
    assert blame({"a": ["b"]}) == {
        "a": "left out: says that it cannot read the key shares of b",
        "b": "left out: sent key shares that a cannot read",
    }
    assert blame({}) == {}


def test_what_each_client_sent_is_counted_for_those_in_the_sum():
    cohort = Cohort("abcdef")
    cohort.sent = {"a": 10, "b": 20, "z": 5}
    found = cohort.sum()
    assert found.bytes_sent == {"a": 10, "b": 20, "c": 0, "d": 0, "e": 0, "f": 0}
    assert found.step == FixedPoint.of(SETTINGS.word_bits, SETTINGS.bound, 6).step
    assert found.clients == tuple("abcdef")
    assert found.dropped == ()


def test_a_sum_that_is_nearly_one_client_s_is_not_opened_and_names_it():
    cohort = Cohort("abcdef")
    with pytest.raises(UserError, match=r"b would have 0\.9 of the weight"):
        cohort.sum([0.02, 0.9, 0.02, 0.02, 0.02, 0.02])
    assert cohort.opened == []
