"""Secure aggregation: sums, dropouts at every stage, what clients refuse, and rounds with liars in them."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.base.errors import UserError
from steelyard.messages.payloads import Summed
from steelyard.privacy import secure
from steelyard.privacy.hidden import FixedPoint, Words
from steelyard.privacy.secure import (
    KEY_SHARES_BYTES,
    Opened,
    PublicKeys,
    SecureClient,
    SecureServer,
    Unopened,
    Unreadable,
    Withdrawn,
    round_context,
    seed_hash,
    self_key,
    vector_digest,
)
from steelyard.privacy.secure_round import MOST_TRIES, HiddenWords, blame, mask_rows, masked_sum, pair_keys, secure_sum
from steelyard.privacy.settings import FEWEST, AggregationSettings

CONTEXT = b"run/federation/round 1"


SETTINGS = AggregationSettings()


class Round:
    """A cohort and its server, one stage after the other; who is not named in a stage has dropped out before it."""

    def __init__(self, names: str, config: AggregationSettings = SETTINGS) -> None:
        self.clients = {name: SecureClient(name, CONTEXT, config) for name in names}
        self.server = SecureServer(CONTEXT, config, "round 1 of test")

    def advertise(self, names: str) -> None:
        self.server.keys = {name: self.clients[name].keys() for name in names}

    def share(self, names: str) -> None:
        for name in names:
            self.server.keep_shares(name, self.clients[name].share(self.server.keys))

    def receive(self, name: str, members: str = "abcd") -> None:
        self.clients[name].receive(tuple(members), self.server.shares_for(name, members))

    def mask(self, members: str, stayed: str, rows: dict[str, Words]) -> Words:
        total = np.zeros_like(next(iter(rows.values())))
        for name in stayed:
            self.receive(name, members)
            total = total + self.clients[name].mask(rows[name])
        return total

    def reveal(self, survivors: str, helpers: str) -> dict[str, Opened]:
        return {name: self.clients[name].open(tuple(survivors)) for name in helpers}


def rows_of(names: str, size: int = 37, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Words], FixedPoint]:
    encoding = FixedPoint.of(32, 16.0, len(names))
    values = {n: np.random.default_rng([seed, ord(n)]).normal(size=size) for n in names}
    return values, {name: encoding.encode(value) for name, value in values.items()}, encoding


@pytest.mark.parametrize(
    ("advertised", "shared", "sent", "helped"),
    [
        ("abcdef", "abcdef", "abcdef", "bcde"),
        ("abcdef", "bcdef", "bcef", "bcef"),
        ("bcdef", "bcdef", "bdef", "bdef"),
    ],
)
def test_the_sum_is_exact_whoever_drops_out_at_which_stage(advertised: str, shared: str, sent: str, helped: str):
    """Of six, four must stay (2/3); of five, four too."""
    values, rows, encoding = rows_of("abcdef")
    work = Round("abcdef")
    work.advertise(advertised)
    work.share(shared)
    total = work.mask(shared, sent, rows)
    with pytest.raises(Unopened, match="3 of 6 clients helped" if advertised == "abcdef" else "3 of 5 clients helped"):
        work.server.open(total, shared, sent, dict.fromkeys(helped[:3], Opened({}, {})))
    plain = work.server.open(total, shared, sent, work.reveal(sent, helped))
    assert plain.tolist() == sum(rows[name] for name in sent).tolist()  # word for word the sum of the encodings
    expected = np.sum([values[name] for name in sent], axis=0)
    np.testing.assert_allclose(encoding.decode(plain), expected, atol=len(sent) * encoding.step / 2)


def test_what_one_client_sends_is_noise():
    """The hidden words of a client that sends zeros take all values alike, and change from round to round."""
    sent = [ready("abc").mask("abc", "a", {"a": np.zeros(60_000, np.uint32)}) for _ in range(2)]
    counts = np.bincount(sent[0] >> 28, minlength=16)
    assert ((counts > 3450) & (counts < 4050)).all()  # 3750 each; 5 standard deviations are 296
    assert (sent[0] == sent[1]).mean() < 0.001


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_simulated_cohort_sends_what_its_clients_would_send_one_by_one(bits: int):
    names, size = "abcde", 70_000
    config = AggregationSettings(bits=bits, bound=0.5)  # type: ignore[arg-type]
    encoding = FixedPoint.of(bits, 0.5, 5)
    rows = {n: encoding.encode(np.random.default_rng(ord(n)).uniform(-0.5, 0.5, size)) for n in names}
    work = ready(names, config)
    singly = work.mask(names, "abde", rows)
    work.receive("c", names)
    clients = list(work.clients.values())
    matrix = np.stack(list(rows.values()))
    together = masked_sum(clients, [0, 1, 3, 4], lambda begin, end: matrix[:, begin:end].copy(), size, encoding)
    assert together.tolist() == singly.tolist()
    masked = matrix.copy()
    mask_rows(clients, pair_keys(clients), masked)
    assert (masked[2] == work.clients["c"].mask(rows["c"])).all()
    plain = work.server.open(together, tuple(names), "abde", work.reveal("abde", "abde"))
    assert (plain == matrix[[0, 1, 3, 4]].sum(axis=0, dtype=encoding.dtype)).all()


def ready(names: str = "abcd", config: AggregationSettings = SETTINGS) -> Round:
    work = Round(names, config)
    work.advertise(names)
    work.share(names)
    return work


def test_shares_that_were_touched_or_put_under_another_name_are_noticed():
    work = ready()
    received = work.server.shares_for("a", "abcd")
    for changed, senders in (
        ({**received, "b": received["c"], "c": received["b"]}, ("b", "c")),
        ({**received, "d": bytes([received["d"][0] ^ 1]) + received["d"][1:]}, ("d",)),
        ({**received, "d": b""}, ("d",)),
        # What a sent to b comes back to a: there is a key for each direction.
        ({**received, "b": work.server.shares_for("b", "abcd")["a"]}, ("b",)),
        ({name: received[name] for name in "bd"}, ("c",)),
    ):
        with pytest.raises(Unreadable, match=f"from {', '.join(senders)} cannot be read") as found:
            work.clients["a"].receive(tuple("abcd"), changed)
        assert found.value.senders == senders


def test_shares_of_another_length_are_noticed_although_they_can_be_decrypted(monkeypatch: pytest.MonkeyPatch):
    work = Round("abc")
    work.advertise("abc")
    work.share("ac")
    monkeypatch.setattr("steelyard.privacy.sharing.deal", lambda secret, least, count: [secret] * count)
    work.share("b")
    with pytest.raises(Unreadable, match="from b cannot be read"):
        work.receive("a", "abc")


@pytest.mark.parametrize("point", [bytes(32), bytes([1]) + bytes(31), (2**255 - 20).to_bytes(32, "little")])
def test_a_mask_key_that_is_none_makes_a_client_withdraw(point: bytes):
    """0, 1 and p - 1 are points of low order: with them X25519 gives everybody the same secret."""
    work = Round("abcd")
    work.advertise("abcd")
    honest = work.server.keys["c"]
    spoiled = {**work.server.keys, "c": dataclasses.replace(honest, mask=point)}
    assert [spoiled[name].usable() for name in "ac"] == [True, False]
    for name, client in work.clients.items():
        work.server.keep_shares(name, client.share({**spoiled, "c": honest} if name == "c" else spoiled))
    work.receive("a")
    with pytest.raises(Withdrawn, match="the mask key of c is not a valid key"):
        work.clients["a"].mask(np.zeros(3, dtype=np.uint32))


# ------------------------------------------------------------------ what the server notices


@pytest.mark.parametrize("lie", ["seed", "key", "missing"])
def test_a_liar_among_the_helpers_is_noticed_and_nothing_is_opened(lie: str):
    work = ready()
    total = work.mask("abcd", "abc", rows_of("abcd")[1])
    revealed, false = work.reveal("abc", "abc"), bytes(32) + b"\x05"
    seeds, keys = {"seed": ({"c": false}, {}), "key": ({}, {"d": false}), "missing": ({}, {})}[lie]
    kept = {} if lie == "missing" else revealed["b"].seeds
    revealed["b"] = Opened({**kept, **seeds}, keys or revealed["b"].keys)
    with pytest.raises(Unopened, match=r"round 1 of test: the shares of [cad]'s secret do not match its key"):
        work.server.open(total, "abcd", "abc", revealed)


@pytest.mark.parametrize("share", [bytes(32) + b"\x05", None, b"\x05"], ids=["false", "missing", "short"])
@pytest.mark.parametrize("liar", "aeh")
def test_where_more_help_than_must_one_liar_does_no_harm(liar: str, share: bytes | None):
    """Of nine clients six must stay: i is gone, and one of the eight that help reveals what opens nothing."""
    _, rows, _ = rows_of("abcdefghi")
    work = ready("abcdefghi")
    total = work.mask("abcdefghi", "abcdefgh", rows)
    revealed = work.reveal("abcdefgh", "abcdefgh")
    seeds, keys = ({} if share is None else dict.fromkeys(found, share) for found in ("abcdefgh", "i"))
    revealed[liar] = Opened(seeds, keys)
    plain = work.server.open(total, "abcdefghi", "abcdefgh", revealed)
    assert plain.tolist() == sum(rows[name] for name in "abcdefgh").tolist()


def test_keys_are_derived_by_hkdf_for_their_purpose_and_round():
    """RFC 5869 by hand; a label that changed would part clients of two versions."""

    def hkdf(secret: bytes, info: bytes) -> bytes:
        return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\x01", "sha256")

    seed, context = bytes(range(32)), b"a round"
    assert round_context("run", "DS", 1, 2, "try") == b'["run", "DS", 1, 2, "try"]'
    known = hashlib.sha256(context).digest()
    assert self_key(seed, context) == hkdf(seed, b"steelyard/1/self/" + known)
    assert seed_hash(seed, context) == hashlib.sha256(b"steelyard/1/seed/a round" + seed).digest()
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    ours, theirs = (each.public_key().public_bytes_raw() for each in (one, other))
    pair = hashlib.sha256(context + b"".join(sorted((ours, theirs)))).digest()
    expected = hkdf(one.exchange(other.public_key()), b"steelyard/1/mask/" + pair)
    assert secure.agree(one, theirs, "mask", context) == secure.agree(other, ours, "mask", context) == expected


def test_each_refusal_of_a_client_says_why():
    work = Round("abcd")
    work.advertise("abcd")
    a, keys = work.clients["a"], work.server.keys

    def refuse(line: str, act: Callable[..., object], *calls: object) -> None:
        for each in calls:
            with pytest.raises(Withdrawn, match=line):
                act(each)

    def receive(members: object) -> None:
        work.receive("a", str(members))

    refuse("asked to hide its update before keys were shared", lambda _: a.receive(tuple("abcd"), {}), None)
    refuse("asked to open a sum before its update was hidden", a.open, "abcd")
    others = {name: keys[name] for name in "bcd"}
    refuse("its own keys came back changed, or not at all", a.share, others, {**others, "a": keys["b"]})
    refuse("2 clients in the round; allowed: at least 3", a.share, {name: keys[name] for name in "ab"})
    same = {**keys, "c": dataclasses.replace(keys["c"], mask=keys["b"].mask)}
    refuse("two clients show the same key", a.share, {**keys, "d": keys["c"]}, same)
    refuse("not a valid key", work.clients["b"].share, {**keys, "c": dataclasses.replace(keys["c"], channel=bytes(32))})
    work.clients["b"] = SecureClient("b", CONTEXT, SETTINGS)
    work.advertise("abcd")
    work.share("abcd")
    refuse("asked twice to share its keys", a.share, keys)
    refuse("2 clients go on; allowed: at least 3", receive, "ab")
    with pytest.raises(Withdrawn, match="names unknown clients, names one twice, or leaves this client out"):
        receive("bcd")
    for members in ("abcx", "aabc"):
        refuse("names unknown clients", lambda given: a.receive(tuple(given), {}), members)
    receive("abcd")
    refuse("asked twice to hide its update", receive, "abcd")
    refuse("the list of survivors names unknown clients, or names one twice", a.open, "abcx", "aabc")
    refuse("asked to open a sum that it is not part of", a.open, "bcd")
    refuse("2 clients are left; allowed: at least 3", a.open, "ab")
    opened = a.open(tuple("abc"))
    assert (sorted(opened.seeds), sorted(opened.keys)) == (["a", "b", "c"], ["d"])
    # With the first answer the second would give d's seed and d's key.
    refuse("asked twice to open a sum", a.open, "abd", "abc")


def test_public_keys_are_read_as_they_were_written():
    keys = SecureClient("a", CONTEXT, SETTINGS).keys()
    assert keys.write() == keys.channel + keys.mask + keys.seed
    assert PublicKeys.read(keys.write()) == keys
    assert [each.usable() for each in (keys, dataclasses.replace(keys, channel=bytes(32)))] == [True, False]
    for length in (95, 97):
        with pytest.raises(ValueError, match="keys: got another length"):
            PublicKeys.read(bytes(length))


def test_a_dumped_client_is_the_same_client():
    work = ready()
    a = work.clients["a"]
    a.fewest = 4
    work.receive("a")
    again = SecureClient.load(a.dump())
    assert again.dump() == a.dump()
    assert (again.name, again.context, again.settings, again.fewest) == ("a", CONTEXT, SETTINGS, 4)
    assert again.mask_keys() == a.mask_keys()
    assert again.open(tuple("abcd")) == a.open(tuple("abcd"))
    with pytest.raises(Withdrawn, match="asked twice to open"):
        SecureClient.load(a.dump()).open(tuple("abcd"))


SIZE = 5


class Cohort:
    """Clients and server without a network. `garbled` send key shares that nobody (or only some) can read, `liars` say
    that they cannot read those of others."""

    def __init__(
        self,
        names: str,
        garbled: Mapping[str, str] | None = None,
        liars: Mapping[str, str] | None = None,
        gone_later: str = "",
    ) -> None:
        self.names, self.garbled, self.liars = names, garbled or {}, liars or {}
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
                shares = self.server.shares_for(name, members)
                self.clients[name].receive(members, shares, vector_digest(members, weights))
            except Unreadable as error:
                unreadable[name] = list(error.senders)
                continue
            if lies := set(self.liars.get(name, "")) & set(members):
                unreadable[name] = sorted(lies)
                continue
            words[name] = self.clients[name].mask(encoding.encode(self.updates[name] * weights[name]))
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
    cohort.sent = {"a": 10, "d": 20}
    summed = cohort.sum(weights)
    assert [(failure.client, failure.reason) for failure in summed.dropped] == [
        ("d", "left out: sent key shares that a, b, c, e, f and 4 more cannot read")
    ]
    assert summed.bytes_sent == {**dict.fromkeys("abcefghij", 0), "a": 10}
    # The weights are those that were given, so that the sum is that of a client that dropped out.
    expected = np.sum([w * cohort.updates[n] for n, w in zip(names, weights, strict=True) if n != "d"], axis=0)
    np.testing.assert_allclose(summed.total, expected, atol=9 * summed.step)
    assert cohort.opened == [(2, tuple("abcefghij"))]  # once, in the second try


def test_a_second_try_has_fresh_keys_and_the_first_can_no_longer_be_opened():
    cohort = Cohort("abcdef", garbled={"f": "ab"})
    assert cohort.sum().clients == tuple("abcde")
    first, second = cohort.tries
    for name in "abcde":
        old, new = first[name].keys(), second[name].keys()
        assert not {old.channel, old.mask, old.seed} & {new.channel, new.mask, new.seed}
    # Whoever hid words in the first try hid the same update again, and nothing of it is seen in the difference.
    for name in set(cohort.words[0]) & set(cohort.words[1]):
        assert (cohort.words[0][name] != cohort.words[1][name]).all()
    with pytest.raises(Withdrawn, match="before its update was hidden"):
        first["a"].open("abcde")  # it withdrew from the first try


@pytest.mark.parametrize(
    ("names", "garbled", "liars", "left"),
    [
        ("abcdefghij", {}, {"c": "abdefghij"}, "c"),  # one that says so of all others
        ("abcdefghij", {}, {"c": "a"}, "ac"),  # one against one: nobody can tell who lies, so the liar pays as well
        ("abcdefghij", {"c": "abdefghij", "g": "abcdefhij"}, {}, "cg"),
        ("abcd", {"c": "a"}, {}, "a"),  # of four three must stay: it goes on without the one that withdrew
    ],
)
def test_who_is_in_most_complaints_is_left_out_and_both_where_nobody_can_tell(
    names: str, garbled: dict[str, str], liars: dict[str, str], left: str
):
    summed = Cohort(names, garbled, liars).sum()
    assert [failure.client for failure in summed.dropped] == list(left)
    assert summed.clients == tuple(n for n in names if n not in left)


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
    for cohort, said in (
        (Cohort(names, garbled=spoiled, gone_later="cd"), "0 of 6 clients shared fresh keys"),
        # Six would be left, so that it is not tried again.
        (Cohort(names, garbled=dict.fromkeys("abcd", names)), "0 of 10 clients sent their hidden update"),
    ):
        assert_refused(cohort.sum, said, "it takes 7")
        assert cohort.opened == []


def test_a_client_s_own_reckoning_holds_the_threshold_of_the_first_try():
    clients = {name: SecureClient(name, b"again", SETTINGS, fewest=7) for name in "abcdefgh"}
    keys = {name: client.keys() for name, client in clients.items()}
    with pytest.raises(Withdrawn, match="6 clients in the round; allowed: at least 7"):
        clients["a"].share({name: keys[name] for name in "abcdef"})
    shares = {name: client.share(keys) for name, client in clients.items()}
    received = {name: shares[name]["a"] for name in "bcdefgh"}
    with pytest.raises(Withdrawn, match="6 clients go on; allowed: at least 7"):
        clients["a"].receive("abcdef", received)
    again = SecureClient.load(clients["a"].dump())
    again.receive("abcdefgh", received)
    with pytest.raises(Withdrawn, match="6 clients are left; allowed: at least 7"):
        again.open("abcdef")


def test_each_stage_at_which_a_round_is_given_up_is_named():
    said = "round 1 of test: 3 of 6 clients shared their keys and can be weighed, and it takes 4"
    few = Cohort("abcdef")
    assert_refused(lambda: secure_sum(few, tuple("abc"), np.full(3, 1 / 3), SETTINGS), said)
    few = Cohort("abcdef")
    few.hide = lambda members, weights: HiddenWords(np.zeros(SIZE, np.uint32), (), {}, {})  # nobody's words arrive
    assert_refused(few.sum, "0 of 6 clients sent", "a: dropped out before", "and 3 more)")


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
    shown = {name: SecureClient(name, b"x", SETTINGS).keys() for name in "abcdef"}
    shown["b"] = dataclasses.replace(shown["b"], mask=shown["b"].channel)
    shown["c"] = dataclasses.replace(shown["c"], channel=bytes(32))
    shown["d"] = dataclasses.replace(shown["d"], channel=shown["e"].mask)
    server = SecureServer(b"x", SETTINGS, "round 1 of test")
    refused = server.admit(shown)
    assert sorted(server.keys) == ["a", "f"]
    assert refused["c"] == "its key is not a valid key"
    twice = "shows the same key twice, or one that another client shows"
    assert {name: refused[name] for name in "bde"} == dict.fromkeys("bde", twice)


def test_a_sum_that_is_nearly_one_client_s_is_not_opened_and_names_it():
    cohort = Cohort("abcdef")
    with pytest.raises(UserError, match=r"b would have 0\.9 of the weight"):
        cohort.sum([0.02, 0.9, 0.02, 0.02, 0.02, 0.02])
    assert cohort.opened == []


def test_a_stream_is_aes_256_in_counter_mode_and_the_same_however_it_is_cut():
    """NIST SP 800-38A, F.5.5 gives AES-256-CTR; of zeros at counter 0 the first block is AES-256(key, 0^16)."""
    from Crypto.Cipher import AES

    key, words = bytes(range(32)), np.dtype("<u4")
    cipher = AES.new(key, AES.MODE_ECB)
    blocks = cipher.encrypt(bytes(16)) + cipher.encrypt((1).to_bytes(16, "big"))
    whole = secure.stream(key, 1000, words)
    assert whole[:8].tobytes() == blocks
    assert secure.stream(key, 200, words, 400).tolist() == whole[400:600].tolist()
    # 1 MiB and a block.
    long = 2**18
    assert secure.stream(key, long + 4, words)[long:].tolist() == secure.stream(key, 4, words, long).tolist()
    with pytest.raises(ValueError, match="multiple of 4"):
        secure.stream(key, 4, words, 2)
