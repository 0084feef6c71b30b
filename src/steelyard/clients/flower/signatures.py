"""What a node signed of its clients' updates: written into its answer, and checked where the answer arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.clients.flower.forms import SignedForm, UpdateForm
from steelyard.messages import Payload, Signed
from steelyard.signing import DIGEST_BYTES, SALT_BYTES, Statement, holds, salted_digest


@dataclass(frozen=True)
class Signer:
    """Whose signature an answer must bear, and what was asked; without one, signatures are not looked at."""

    run: str
    task: str
    """Digest of the task."""
    key: str
    """The node's public key, as one line of OpenSSH."""

    def check(self, form: UpdateForm, payload: Payload) -> tuple[dict[str, Signed], dict[str, str]]:
        """Return what holds, and why the rest does not, both by client."""
        content = payload.content() if form.signed else None
        found: dict[str, Signed] = {}
        faults: dict[str, str] = {}
        for one in form.signed:
            if one.client not in form.clients:
                continue
            part = None if content is None else content[form.clients.index(one.client)].reshape(-1).data
            signed = self._held(form, one, part)
            if isinstance(signed, Signed):
                found[one.client] = signed
            else:
                faults[one.client] = f"signature: {signed}"
        return found, faults

    def _held(self, form: UpdateForm, one: SignedForm, part: memoryview | None) -> Signed | str:
        try:
            digest, salt, signature = (bytes.fromhex(text) for text in (one.digest, one.salt, one.signature))
        except ValueError:
            return "not hexadecimal digits"
        if len(digest) != DIGEST_BYTES or len(salt) not in (0, SALT_BYTES):
            return f"its digest has {len(digest)} bytes and its salt {len(salt)}"
        if part is not None and salted_digest(salt, part) != digest:
            return "its digest is not that of the update that came"
        said = Statement(self.run, form.federation, form.round, one.client, self.task, digest)
        if not holds(self.key, signature, said.content()):
            return "does not hold by the key that its node has registered"
        return Signed(digest, salt, self.key, signature)


def written(signed: Mapping[str, Signed]) -> list[SignedForm]:
    """Return what a node signed as its answer says it."""
    return [
        SignedForm(client=client, digest=one.digest.hex(), salt=one.salt.hex(), signature=one.signature.hex())
        for client, one in sorted(signed.items())
    ]
