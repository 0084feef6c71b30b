"""Secure aggregation end to end, client by client: sums, dropouts at every stage, and what clients refuse."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.privacy import masks
from steelyard.privacy.fixed_point import FixedPoint, Words
from steelyard.privacy.masked_sum import mask_rows, masked_sum, pair_keys
from steelyard.privacy.secure_client import (
    Opened,
    PublicKeys,
    SecureClient,
    Unreadable,
    Withdrawn,
    seed_hash,
    self_key,
)
from steelyard.privacy.secure_server import SecureServer, Unopened
from steelyard.privacy.settings import AggregationSettings

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

    def mask(self, members: str, stayed: str, rows: dict[str, Words]) -> Words:
        total = np.zeros_like(next(iter(rows.values())))
        for name in stayed:
            self.clients[name].receive(tuple(members), self.server.shares_for(name, members))
            total = total + self.clients[name].mask(rows[name])
        return total

    def open(self, total: Words, members: str, survivors: str, helpers: str) -> Words:
        revealed = {name: self.clients[name].open(tuple(survivors)) for name in helpers}
        return self.server.open(total, tuple(members), tuple(survivors), revealed)


def rows_of(names: str, size: int = 37, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Words], FixedPoint]:
    encoding = FixedPoint.of(32, 16.0, len(names))
    values = {n: np.random.default_rng([seed, ord(n)]).normal(size=size) for n in names}
    return values, {name: encoding.encode(value) for name, value in values.items()}, encoding


@pytest.mark.parametrize(
    ("advertised", "shared", "sent", "helped"),
    [
        ("abcdef", "abcdef", "abcdef", "abcdef"),
        ("abcdef", "abcdef", "abcdef", "bcde"),
        ("abcdef", "abcdef", "abde", "abde"),
        ("abcdef", "bcdef", "bcef", "bcef"),
        ("abcdef", "abcf", "abcf", "abcf"),
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
    plain = work.open(total, shared, sent, helped)
    assert plain.tolist() == sum(rows[name] for name in sent).tolist()  # word for word the sum of the encodings
    expected = np.sum([values[name] for name in sent], axis=0)
    np.testing.assert_allclose(encoding.decode(plain), expected, atol=len(sent) * encoding.step / 2)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_with_up_to_n_minus_t_gone_the_sum_is_right_and_with_more_it_is_given_up(data: st.DataObject):
    count = data.draw(st.integers(3, 8), label="clients")
    config = AggregationSettings(threshold=data.draw(st.sampled_from([0.51, 2 / 3, 0.9, 1.0])))
    names = "abcdefgh"[:count]
    least = max(3, config.least(count))
    values, rows, encoding = rows_of(names, 11, data.draw(st.integers(0, 99)))
    sent = "".join(sorted(data.draw(st.permutations(names))[: data.draw(st.integers(1, count), label="sent")]))
    helped = "".join(sorted(data.draw(st.permutations(sent))[: data.draw(st.integers(1, len(sent)), label="helped")]))
    work = Round(names, config)
    work.advertise(names)
    work.share(names)
    total = work.mask(names, sent, rows)
    if len(helped) >= least:
        plain = work.open(total, names, sent, helped)
        assert plain.tolist() == sum(rows[name] for name in sent).tolist()
        expected = np.sum([values[name] for name in sent], axis=0)
        np.testing.assert_allclose(encoding.decode(plain), expected, atol=count * encoding.step)
    else:
        with pytest.raises((Unopened, Withdrawn)):
            work.open(total, names, sent, helped)


def test_the_server_says_that_too_few_stayed():
    work = Round("abcdef")
    work.advertise("abcdef")
    with pytest.raises(Unopened, match=r"round 1 of test: 3 of 6 clients sent .*it takes 4.*threshold"):
        work.server.open(np.zeros(1, np.uint32), "abcdef", "abc", {})
    with pytest.raises(Unopened, match="2 of 6 clients helped"):
        work.server.open(np.zeros(1, np.uint32), "abcdef", "abcd", dict.fromkeys("ab", Opened({}, {})))


def test_what_one_client_sends_is_noise():
    """The hidden words of a client that sends zeros take all values alike, and change from round to round."""
    work, again = Round("abc"), Round("abc")
    zeros = {name: np.zeros(60_000, np.uint32) for name in "abc"}
    sent: list[Words] = []
    for each in (work, again):
        each.advertise("abc")
        each.share("abc")
        each.clients["a"].receive(("a", "b", "c"), each.server.shares_for("a", "abc"))
        sent.append(each.clients["a"].mask(zeros["a"]))
    counts = np.bincount(sent[0] >> 28, minlength=16)
    assert ((counts > 3450) & (counts < 4050)).all()  # 3750 each; 5 standard deviations are 296
    assert (sent[0] == sent[1]).mean() < 0.001


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_simulated_cohort_sends_what_its_clients_would_send_one_by_one(bits: int):
    names, size = "abcde", 70_000
    config = AggregationSettings(bits=bits, bound=0.5)  # type: ignore[arg-type]
    encoding = FixedPoint.of(bits, 0.5, 5)
    rows = {n: encoding.encode(np.random.default_rng(ord(n)).uniform(-0.5, 0.5, size)) for n in names}
    work = Round(names, config)
    work.advertise(names)
    work.share(names)
    singly = work.mask(names, "abde", rows)
    work.clients["c"].receive(tuple(names), work.server.shares_for("c", names))
    clients = [work.clients[name] for name in names]
    matrix = np.stack([rows[name] for name in names])
    together = masked_sum(clients, [0, 1, 3, 4], lambda begin, end: matrix[:, begin:end].copy(), size, encoding)
    assert together.tolist() == singly.tolist()
    masked = matrix.copy()
    mask_rows(clients, pair_keys(clients), masked)
    assert (masked[2] == work.clients["c"].mask(rows["c"])).all()
    plain = work.open(together, names, "abde", "abde")
    assert (plain == matrix[[0, 1, 3, 4]].sum(axis=0, dtype=encoding.dtype)).all()


def test_a_client_goes_on_in_another_process():
    _, rows, _ = rows_of("abcd")
    work = Round("abcd")

    def move() -> None:
        work.clients = {name: SecureClient.load(client.dump()) for name, client in work.clients.items()}

    work.advertise("abcd")
    move()
    work.share("abcd")
    move()
    total = work.mask("abcd", "abc", rows)
    move()
    plain = work.open(total, "abcd", "abc", "abc")
    assert plain.tolist() == sum(rows[name] for name in "abc").tolist()
    move()
    with pytest.raises(Withdrawn, match="twice"):
        work.clients["a"].open("abc")


def test_a_pair_agrees_on_a_key_for_each_purpose_and_context():
    one, other = SecureClient("a", CONTEXT, SETTINGS), SecureClient("b", CONTEXT, SETTINGS)
    left = masks.agree(one._mask, other.keys().mask, "mask", CONTEXT)
    assert left == masks.agree(other._mask, one.keys().mask, "mask", CONTEXT)
    assert len(left) == 32
    assert left != masks.agree(one._mask, other.keys().mask, "channel", CONTEXT)
    assert left != masks.agree(one._mask, other.keys().mask, "mask", b"another round")


def test_a_stream_is_the_same_however_it_is_cut():
    key = bytes(range(32))
    whole = masks.stream(key, 1000, np.dtype("<u4"))
    assert masks.stream(key, 200, np.dtype("<u4"), 400).tolist() == whole[400:600].tolist()
    with pytest.raises(ValueError, match="multiple of 4"):
        masks.stream(key, 4, np.dtype("<u4"), 2)


def test_the_stream_is_aes_256_in_counter_mode():
    """NIST SP 800-38A, F.5.5 gives AES-256-CTR; of zeros at counter 0 the first block is AES-256(key, 0^16)."""
    # FIPS-197's key for AES-256 with the all-zero block, as any implementation of AES gives it.
    from Crypto.Cipher import AES

    key = bytes(range(32))
    first = AES.new(key, AES.MODE_ECB).encrypt(bytes(16))
    second = AES.new(key, AES.MODE_ECB).encrypt((1).to_bytes(16, "big"))
    assert masks.stream(key, 32, np.dtype("<u1")).tobytes() == first + second


# ------------------------------------------------------------------ what clients refuse


def ready(names: str = "abcd") -> Round:
    work = Round(names)
    work.advertise(names)
    work.share(names)
    return work


def test_a_client_opens_a_sum_once_and_never_tells_both_kinds_of_share():
    _, rows, _ = rows_of("abcd")
    work = ready()
    work.mask("abcd", "abcd", rows)
    revealed = work.clients["a"].open("abc")
    assert set(revealed.seeds) == set("abc")
    assert set(revealed.keys) == {"d"}
    with pytest.raises(Withdrawn, match="twice"):
        work.clients["a"].open("abd")  # with the first answer this would give d's seed and d's key


@pytest.mark.parametrize(
    ("survivors", "why"), [("ab", "2 clients are left; allowed: at least"), ("bcd", "not part of"), ("abz", "unknown"),
                           ("aab", "twice")]
)  # fmt: skip
def test_a_client_opens_no_sum_of_too_few_or_of_others(survivors: str, why: str):
    _, rows, _ = rows_of("abcd")
    work = ready()
    work.mask("abcd", "abcd", rows)
    with pytest.raises(Withdrawn, match=why):
        work.clients["a"].open(survivors)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ("ab", "2 clients go on; allowed: at least 3"),
        ("bcd", "leaves this client out"),
        ("abcz", "unknown clients"),
        ("aabc", "twice"),
    ],
)
def test_a_client_hides_nothing_among_too_few_or_strangers(members: str, why: str):
    work = ready()
    with pytest.raises(Withdrawn, match=why):
        work.clients["a"].receive(tuple(members), work.server.shares_for("a", "abcd"))


def test_a_client_hides_one_update_in_a_round():
    work = ready()
    work.clients["a"].receive(tuple("abcd"), work.server.shares_for("a", "abcd"))
    with pytest.raises(Withdrawn, match="twice"):
        work.clients["a"].receive(tuple("abc"), work.server.shares_for("a", "abc"))


def test_shares_that_were_touched_or_put_under_another_name_are_noticed():
    work = ready()
    received = work.server.shares_for("a", "abcd")
    swapped = {**received, "b": received["c"], "c": received["b"]}
    with pytest.raises(Unreadable, match="from b, c cannot be read") as found:
        work.clients["a"].receive(tuple("abcd"), swapped)
    assert found.value.senders == ("b", "c")
    touched = {**received, "d": bytes([received["d"][0] ^ 1]) + received["d"][1:]}
    with pytest.raises(Withdrawn, match="from d cannot be read"):
        work.clients["a"].receive(tuple("abcd"), touched)
    with pytest.raises(Withdrawn, match="from c cannot be read"):
        work.clients["a"].receive(tuple("abcd"), {name: received[name] for name in "bd"})


def test_stages_cannot_be_skipped_or_repeated():
    work = Round("abcd")
    with pytest.raises(Withdrawn, match="before keys were shared"):
        work.clients["a"].receive(tuple("abcd"), {})
    work.advertise("abcd")
    work.share("abcd")
    with pytest.raises(Withdrawn, match="asked twice to share"):
        work.clients["a"].share(work.server.keys)
    with pytest.raises(Withdrawn, match="before its update was hidden"):
        work.clients["a"].open("abcd")


def test_a_client_looks_at_the_keys_that_it_is_shown():
    work = Round("abcd")
    work.advertise("abcd")
    keys = work.server.keys
    with pytest.raises(Withdrawn, match="came back changed"):
        work.clients["a"].share({**keys, "a": keys["b"]})
    with pytest.raises(Withdrawn, match="came back changed"):
        work.clients["a"].share({name: keys[name] for name in "bcd"})
    with pytest.raises(Withdrawn, match="same key"):
        work.clients["a"].share({**keys, "c": dataclasses.replace(keys["c"], mask=keys["b"].mask)})
    with pytest.raises(Withdrawn, match="2 clients in the round; allowed: at least 3"):
        work.clients["a"].share({name: keys[name] for name in "ab"})
    with pytest.raises(Withdrawn, match="not a valid key"):
        work.clients["a"].share({**keys, "c": PublicKeys(bytes(32), keys["c"].mask, keys["c"].seed)})
    with pytest.raises(ValueError, match="32 bytes"):
        PublicKeys(b"short", bytes(32), bytes(32))


@pytest.mark.parametrize("point", [bytes(32), bytes([1]) + bytes(31), (2**255 - 20).to_bytes(32, "little")])
def test_a_mask_key_that_is_none_makes_a_client_withdraw(point: bytes):
    """0, 1 and p - 1 are points of low order: with them X25519 gives everybody the same secret."""
    work = Round("abcd")
    work.advertise("abcd")
    work.server.keys["c"] = dataclasses.replace(work.server.keys["c"], mask=point)
    assert not work.server.keys["c"].usable()
    assert work.server.keys["a"].usable()
    for name in "abd":
        work.server.keep_shares(name, work.clients[name].share(work.server.keys))
    client = work.clients["a"]
    work.server.keep_shares("c", dict.fromkeys("abd", bytes(82)))
    client._cohort["c"] = work.server.keys["c"]
    client._members = ("a", "b", "c", "d")
    with pytest.raises(Withdrawn, match="the mask key of c is not a valid key"):
        client.mask(np.zeros(3, dtype=np.uint32))


# ------------------------------------------------------------------ what the server notices


def test_a_liar_among_the_helpers_is_noticed_and_nothing_is_opened():
    _, rows, _ = rows_of("abcd")
    for lie in ("seed", "key", "missing"):
        work = ready()
        total = work.mask("abcd", "abc", rows)
        revealed = {name: work.clients[name].open("abc") for name in "abc"}
        false = bytes(32) + b"\x05"
        if lie == "seed":
            revealed["b"] = Opened({**revealed["b"].seeds, "c": false}, revealed["b"].keys)
        elif lie == "key":
            revealed["b"] = Opened(revealed["b"].seeds, {"d": false})
        else:
            revealed["b"] = Opened({}, revealed["b"].keys)
        with pytest.raises(Unopened, match=r"the shares of [cad]'s secret do not match its key"):
            work.server.open(total, "abcd", "abc", revealed)


@pytest.mark.parametrize("liar", "abcdefgh")
@pytest.mark.parametrize("lie", ["false", "missing", "short"])
def test_where_more_help_than_must_one_liar_does_no_harm(liar: str, lie: str):
    """Of nine clients six must stay: i is gone, and one of the eight that help reveals what opens nothing."""
    _, rows, _ = rows_of("abcdefghi")
    work = ready("abcdefghi")
    total = work.mask("abcdefghi", "abcdefgh", rows)
    revealed = {name: work.clients[name].open(tuple("abcdefgh")) for name in "abcdefgh"}
    share = {"false": bytes(32) + b"\x05", "short": b"\x05"}.get(lie)
    seeds, keys = ({} if share is None else dict.fromkeys(found, share) for found in ("abcdefgh", "i"))
    revealed[liar] = Opened(seeds, keys)
    plain = work.server.open(total, "abcdefghi", "abcdefgh", revealed)
    assert plain.tolist() == sum(rows[name] for name in "abcdefgh").tolist()


def test_false_shares_that_a_client_dealt_are_put_down_to_it():
    _, rows, _ = rows_of("abcdef")
    work = ready("abcdef")
    total = work.mask("abcdef", "abcdef", rows)
    revealed = {name: work.clients[name].open("abcdef") for name in "abcdef"}
    for name in "abdef":  # c keeps its own
        revealed[name] = Opened({**revealed[name].seeds, "c": bytes(32) + bytes([ord(name)])}, {})
    with pytest.raises(Unopened, match=r"round 1 of test: the shares of c's secret do not match .*false shares"):
        work.server.open(total, "abcdef", "abcdef", revealed)


def test_each_helper_is_missing_from_one_of_the_sets_that_are_tried():
    server = SecureServer(b"x", AggregationSettings(), "round 1 of test", fewest=3)
    assert ["".join(found) for found in server._choices("ab")] == []
    assert ["".join(found) for found in server._choices("abc")] == ["abc"]
    assert ["".join(found) for found in server._choices("abcd")] == ["abc", "bcd", "acd", "abd", "abc"]
    assert ["".join(found) for found in server._choices("abcde")] == ["abc", "cde", "abe", "abc"]


def test_keys_are_derived_by_hkdf_for_their_purpose_and_round():
    """RFC 5869 by hand; a label that changed would part clients of two versions."""

    def hkdf(secret: bytes, info: bytes) -> bytes:
        return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\x01", "sha256")

    seed, context = bytes(range(32)), b"a round"
    known = hashlib.sha256(context).digest()
    assert self_key(seed, context) == hkdf(seed, b"steelyard/1/self/" + known)
    assert seed_hash(seed, context) == hashlib.sha256(b"steelyard/1/seed/a round" + seed).digest()


def test_the_server_takes_key_shares_for_each_other_client():
    work = Round("abc")
    work.advertise("abc")
    shares = work.clients["a"].share(work.server.keys)
    with pytest.raises(ValueError, match="one for each"):
        work.server.keep_shares("a", {"b": shares["b"]})


@pytest.mark.parametrize(
    ("clients", "threshold", "least"), [(3, None, 2), (9, None, 6), (10, None, 7), (10, 0.51, 6), (10, 1.0, 10),
                                        (4, 0.51, 3)]
)  # fmt: skip
def test_the_threshold_by_hand(clients: int, threshold: float | None, least: int):
    assert AggregationSettings(threshold=threshold).least(clients) == least


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0.5}, {"threshold": 1.1}, {"key_bits": 3072}, {"kind": "paillier", "key_bits": 1024},
     {"kind": "paillier", "key_bits": 3000}, {"kind": "ckks", "bits": 32}, {"kind": "ckks", "threshold": 0.9},
     {"bound": 0}, {"bits": 8}, {"largest_weight": 0}],
)  # fmt: skip
def test_settings_that_promise_nothing_are_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=next(name for name in wrong if name != "kind")):
        AggregationSettings.model_validate(wrong)


# ---------------------------------------------------------------- what is said, word for word


def refused(asked: Callable[[], object]) -> str:
    with pytest.raises(Withdrawn) as found:
        asked()
    return str(found.value)


def test_each_refusal_of_a_client_says_why():
    work = Round("abcd")
    work.advertise("abcd")
    a = work.clients["a"]
    assert refused(lambda: a.receive(tuple("abcd"), {})) == "asked to hide its update before keys were shared"
    assert refused(lambda: a.open(tuple("abcd"))) == "asked to open a sum before its update was hidden"
    changed = "its own keys came back changed, or not at all"
    others = {name: keys for name, keys in work.server.keys.items() if name != "a"}
    assert refused(lambda: a.share(others)) == changed
    assert refused(lambda: a.share({**others, "a": work.clients["b"].keys()})) == changed
    two = {name: work.server.keys[name] for name in "ab"}
    assert refused(lambda: a.share(two)) == "2 clients in the round; allowed: at least 3"
    doubled = {**work.server.keys, "d": work.server.keys["c"]}
    assert refused(lambda: a.share(doubled)) == "two clients show the same key"
    work.share("abcd")
    assert refused(lambda: a.share(work.server.keys)) == "asked twice to share its keys; allowed: once a round"
    assert refused(lambda: a.receive(tuple("ab"), {})) == "2 clients go on; allowed: at least 3"
    wrong = "the list of clients that go on names unknown clients, names one twice, or leaves this client out"
    for members in ("bcd", "abcx", "aabc"):
        assert refused(lambda members=members: a.receive(tuple(members), {})) == wrong
    assert refused(lambda: a.receive(tuple("abcd"), {})) == "the key shares that came from b, c, d cannot be read"
    a.receive(tuple("abcd"), work.server.shares_for("a", "abcd"))
    again = "asked twice to hide its update; allowed: once a round"
    assert refused(lambda: a.receive(tuple("abcd"), work.server.shares_for("a", "abcd"))) == again
    unknown = "the list of survivors names unknown clients, or names one twice"
    for survivors in ("abcx", "aabc"):
        assert refused(lambda survivors=survivors: a.open(tuple(survivors))) == unknown
    assert refused(lambda: a.open(tuple("bcd"))) == "asked to open a sum that it is not part of"
    assert refused(lambda: a.open(tuple("ab"))) == "2 clients are left; allowed: at least 3"
    opened = a.open(tuple("abc"))
    assert (sorted(opened.seeds), sorted(opened.keys)) == (["a", "b", "c"], ["d"])
    assert refused(lambda: a.open(tuple("abc"))) == "asked twice to open a sum; allowed: once a round"
    assert (a.members, a.cohort_size, a.least) == (("a", "b", "c", "d"), 4, 3)


def test_public_keys_are_read_as_they_were_written():
    keys = SecureClient("a", CONTEXT, SETTINGS).keys()
    assert len(keys.write()) == 96
    assert PublicKeys.read(keys.write()) == keys
    assert (keys.write()[:32], keys.write()[32:64], keys.write()[64:]) == (keys.channel, keys.mask, keys.seed)
    assert keys.usable()
    assert not PublicKeys(bytes(32), keys.mask, keys.seed).usable()
    assert not PublicKeys(keys.channel, bytes(32), keys.seed).usable()
    for length in (95, 97):
        with pytest.raises(ValueError, match=r"^keys: got another length; allowed: 32 bytes each$"):
            PublicKeys.read(bytes(length))


def test_key_shares_of_another_length_cannot_be_read():
    work = Round("abc")
    work.advertise("abc")
    work.share("abc")
    b = work.clients["b"]
    for size in (0, 65, 67):
        text = ChaCha20Poly1305(b._channel_key("a", "b")).encrypt(bytes(12), bytes(size), None)
        shares = {**work.server.shares_for("a", "abc"), "b": text}
        with pytest.raises(Unreadable) as found:
            work.clients["a"].receive(tuple("abc"), shares)
        assert found.value.senders == ("b",)


def test_a_dumped_client_is_the_same_client():
    work = Round("abcd")
    work.advertise("abcd")
    work.share("abcd")
    a = work.clients["a"]
    a.fewest = 4
    a.receive(tuple("abcd"), work.server.shares_for("a", "abcd"))
    again = SecureClient.load(a.dump())
    assert again.dump() == a.dump()
    assert (again.name, again.context, again.settings, again.fewest) == ("a", CONTEXT, SETTINGS, 4)
    assert (again.members, again.keys(), again.mask_keys()) == (a.members, a.keys(), a.mask_keys())
    assert again.open(tuple("abcd")) == a.open(tuple("abcd"))
    assert refused(lambda: SecureClient.load(a.dump()).open(tuple("abcd"))).startswith("asked twice to open")


def test_what_the_server_gives_up_with():
    server = SecureServer(CONTEXT, SETTINGS, "round 7 of DS")
    server.keys = {name: SecureClient(name, CONTEXT, SETTINGS).keys() for name in "abcdef"}
    server.require(4, "stayed")
    with pytest.raises(Unopened) as found:
        server.require(3, "stayed")
    assert str(found.value) == (
        "round 7 of DS: 3 of 6 clients stayed, and it takes 4 to open a sum (privacy.aggregation.threshold); allowed: "
        "resume the run when more clients are there"
    )
    with pytest.raises(ValueError, match="key shares: not one for each other client; allowed: one for each"):
        server.keep_shares("a", {"b": b""})
    assert server.shares_for("z", "z") == {}
