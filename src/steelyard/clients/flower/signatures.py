"""What a node signed of its clients' updates: written into its answer, and checked where the answer arrives."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.clients.flower.forms import SignedForm, UpdateForm
from steelyard.messages.payloads import Payload
from steelyard.messages.updates import Signed
from steelyard.proof.signing import DIGEST_BYTES, SALT_BYTES, holds, salted_digest
from steelyard.proof.statements import Statement

_SIGNATURE_DIGITS = 2 * 104
"""Of the longest signature on P-384. How long one is, is chance; the size of an answer is recorded and must not be."""


@dataclass(frozen=True)
class Signer:
    """Whose signature an answer must bear, and what was asked; without one, signatures are not looked at."""

    run: str
    task: str
    """Digest of the task."""
    key: str
    """The node's public key, as one line of OpenSSH."""

    def check(self, form: UpdateForm, payload: Payload) -> tuple[tuple[Signed, ...], dict[str, str]]:
        """Return what the node signed, where that holds, and by client why its update cannot be used."""
        if form.signed is None:
            return (), {}
        signed = self._held(form, form.signed)
        if not isinstance(signed, Signed):
            return (), dict.fromkeys(form.clients, f"signature: {signed}")
        content = payload.content()
        faults: dict[str, str] = {}
        for at, client in enumerate(form.clients):
            if client not in signed.digests:
                faults[client] = "signature: does not name it"
            elif content is not None and (
                salted_digest(signed.salts.get(client, b""), content[at].reshape(-1).data) != signed.digests[client]
            ):
                faults[client] = "signature: its digest is not that of the update that came"
        return (signed,), faults

    def _held(self, form: UpdateForm, said: SignedForm) -> Signed | str:
        try:
            digests = {client: bytes.fromhex(text) for client, text in said.digests.items()}
            salts = {client: bytes.fromhex(text) for client, text in said.salts.items()}
            signature = bytes.fromhex(said.signature)
        except ValueError:
            return "not hexadecimal digits"
        lengths = {len(digest) for digest in digests.values()}, {len(salt) for salt in salts.values()}
        if lengths[0] - {DIGEST_BYTES} or lengths[1] - {SALT_BYTES}:
            return f"its digests have {sorted(lengths[0])} bytes and its salts {sorted(lengths[1])}"
        named = {*form.clients, *(failure.client for failure in form.failures)}
        if digests.keys() - named or salts.keys() - digests.keys():
            return "names a client that the answer does not"
        statement = Statement(self.run, form.federation, form.round, self.task, said.before, digests)
        if not holds(self.key, signature, statement.content()):
            return "does not hold by the key that its node has registered"
        return Signed(self.key, said.before, digests, salts, signature)


def written(signed: tuple[Signed, ...]) -> SignedForm | None:
    """Return what a node signed as its answer says it."""
    for one in signed:
        digests = {client: digest.hex() for client, digest in one.digests.items()}
        salts = {client: salt.hex() for client, salt in one.salts.items()}
        signature = one.signature.hex().ljust(_SIGNATURE_DIGITS)
        return SignedForm(before=one.before, digests=digests, salts=salts, signature=signature)
    return None
