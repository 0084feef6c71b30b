"""What is hashed and signed of a run, and by which keys: fields, digests of updates, heads, P-384 signatures.

docs/reference/chain.md defines every byte. Both ends of a federation use this file, so that a node and its server come
to the same bytes. `cryptography` is imported inside functions, for speed of start: most readers of a run check no
signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.base.errors import UserError
from steelyard.messages.updates import LossState, Task

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.asymmetric import ec

VERSION = 3
"""Of the chain's definition: the first field of every record; another definition gets another number."""
SALT_BYTES = 16
DIGEST_BYTES = 32
_CURVE = "secp384r1"
HEAD_KEY = "STEELYARD_HEAD_KEY"
"""Environment variable that names the private key which signs the heads of runs."""


def field(name: str, value: object) -> bytes:
    """Return a field: its name, its kind, its length and its value. What is not known has no field."""
    if value is None:
        return b""
    if isinstance(value, float):
        kind, content = "real", struct.pack("<d", value + 0.0)  # -0.0 becomes 0.0, as it does in the database
    elif isinstance(value, int):
        kind, content = "whole", str(value).encode()
    elif isinstance(value, str):
        kind, content = "text", value.encode()
    else:
        assert isinstance(value, bytes)
        kind, content = "bytes", value
    return b"%s %s %d\n%s\n" % (name.encode(), kind.encode(), len(content), content)


def fields(**values: object) -> bytes:
    """Return several fields, one after the other."""
    return b"".join(field(name, value) for name, value in values.items())


# ---------------------------------------------------------------- digests


def task_digest(
    federation: str,
    seed: int,
    round: int,
    loss: LossState,
    algorithm: Mapping[str, Any],
    model: str,
    vectors: Mapping[str, str],
) -> str:
    """Return the SHA-256 of what clients were asked; `model` and `vectors` are the digests of what they were sent."""
    said = fields(
        federation=federation,
        seed=seed,
        round=round,
        loss=json.dumps(asdict(loss), sort_keys=True),
        algorithm=json.dumps(dict(algorithm), sort_keys=True),
        model=model,
    )
    said += b"".join(fields(vector=name, digest=vectors[name]) for name in sorted(vectors))
    return hashlib.sha256(said).hexdigest()


def model_digest(parameters: torch.Tensor) -> str:
    """Return the SHA-256 of a model's numbers, float32 and little-endian, in hexadecimal digits."""
    return hashlib.sha256(parameters.detach().cpu().contiguous().numpy().data).hexdigest()


def digest_of_task(task: Task, algorithm: Mapping[str, Any]) -> str:
    """Return the digest of a task as its server and its nodes know it."""
    vectors = {name: model_digest(vector) for name, vector in task.vectors.items()}
    asked = (task.federation, task.seed, task.round, task.loss, algorithm)
    return task_digest(*asked, model_digest(task.parameters), vectors)


def server_salt(secret: str, federation: str, round: int, client: str) -> bytes:
    """Return the salt of an update of which no node brought one; a run that promises something has a secret."""
    said = fields(salt=secret or None, federation=federation, round=round, client=client)
    return hashlib.sha256(said).digest()[:SALT_BYTES]


def salted_digest(salt: bytes, content: Any) -> bytes:
    """Return the SHA-256 of a salt and the bytes of an update after it."""
    taken = hashlib.sha256(salt)
    taken.update(content)
    return taken.digest()


# ---------------------------------------------------------------- heads


def head_statement(run: str, round: int, head: str) -> bytes:
    """Return the bytes that a server signs of the chain after a round."""
    return fields(statement="head", run=run, round=round, head=head)


def closing_statement(run: str, hash: str) -> bytes:
    """Return the bytes that a server signs of the record that closes a run's chain."""
    return fields(statement="closing", run=run, hash=hash)


def link(before: str, round: int, statements: str | None, record: str) -> str:
    """Return the head after a round: the hash of the head before, the root of the statements, the round's record."""
    said = fields(chain=VERSION, before=before, round=round, statements=statements, record=record)
    return hashlib.sha256(said).hexdigest()


# ---------------------------------------------------------------- keys


def fingerprint(line: str) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -l` shows it."""
    content = base64.b64decode(line.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


class SigningKey:
    """A private key on P-384; read it with `SigningKey.read`."""

    def __init__(self, private: ec.EllipticCurvePrivateKey) -> None:
        from cryptography.hazmat.primitives import serialization  # Late for speed of start.

        self._private = private
        public = private.public_key()
        self.line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        """The public key, as one line of OpenSSH."""
        self._secret = private.private_numbers().private_value.to_bytes(48, "big")

    @classmethod
    def read(cls, file: Path) -> SigningKey:
        """Read a private key that `steelyard federate key` made; anything else is refused."""
        return cls(read_private_key(file))

    def sign(self, content: bytes) -> bytes:
        """Sign with ECDSA and SHA-384."""
        from cryptography.hazmat.primitives import hashes  # Late for speed of start.
        from cryptography.hazmat.primitives.asymmetric import ec

        return self._private.sign(content, ec.ECDSA(hashes.SHA384()))

    def salt(self, run: str, federation: str, round: int, task: str, client: str) -> bytes:
        """Return a salt that only this key can make, and makes again where a round is repeated to the same bits."""
        said = fields(salt=1, run=run, federation=federation, round=round, task=task, client=client)
        return hmac.digest(self._secret, said, "sha256")[:SALT_BYTES]


def holds(line: str, signature: bytes, content: bytes) -> bool:
    """Whether a public key (one line of OpenSSH) signed these bytes; False for a line that is no key on P-384."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # Late for speed of start.
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_public_key(line.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != _CURVE:
            return False
        key.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def read_private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Return a private key on P-384; anything else is refused."""
    from cryptography.hazmat.primitives import serialization  # Late for speed of start.
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"key: {file} cannot be read: {error.strerror}; allowed: a private key") from error
    except Exception:
        raise UserError(f"key: {file} is not a private key; allowed: what `steelyard federate key` made") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != _CURVE:
        raise UserError(f"key: {file} is of another kind; allowed: what `steelyard federate key` made")
    return key


def read_public_key(file: Path) -> str:
    """Return the public key in a .pub file as one line without a comment; any other file is refused."""
    from cryptography.hazmat.primitives import serialization  # Late for speed of start.

    try:
        line = " ".join(file.read_text(encoding="ascii").split()[:2])
        serialization.load_ssh_public_key(line.encode())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; allowed: a .pub file") from error
    except Exception:
        raise UserError(f"{file}: not a public key; allowed: the .pub file of `steelyard federate key`") from None
    return line


def key_pair() -> tuple[bytes, bytes]:
    """Return a new key pair on P-384 in OpenSSH's form: private, public."""
    from cryptography.hazmat.primitives import serialization  # Late for speed of start.
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public


def head_key() -> SigningKey | None:
    """Return the key that signs the heads of runs on this machine; None where no key is named.

    Refuses one that other accounts of the machine can read.
    """
    name = os.environ.get(HEAD_KEY)
    if not name:
        return None
    file = Path(name)
    key = SigningKey.read(file)
    if os.stat(file).st_mode & 0o077:
        raise UserError(f"key: {file} can be read by others; allowed: mode 600 (`chmod 600 {file}`)")
    return key


SERVER = "server"
"""The file of this name, with .pub, in a folder of keys is the server's."""


@dataclass(frozen=True)
class Keys:
    """Public keys that a checker trusts: by name of their file, each one line of OpenSSH."""

    named: Mapping[str, str] = dataclass_field(default_factory=dict[str, str])
    folder: Path | None = None
    """None: the keys are those that the run's own folder holds."""

    @classmethod
    def read(cls, folder: Path, where: str = "--keys") -> Keys:
        """Read every .pub file of a folder; `where` begins the line of a refusal."""
        if not folder.is_dir():
            raise UserError(f"{where}: {folder} is no folder; allowed: a folder of .pub files")
        found = {file.stem: read_public_key(file) for file in sorted(folder.glob("*.pub"))}
        if not found:
            raise UserError(f"{where}: no .pub file in {folder}; allowed: a folder with the public keys of nodes")
        return cls(found, folder)

    def refusal(self, signer: str, client: str | None) -> str | None:
        """Say why a key may not sign for a client (None: for the server), or None where it may."""
        assert self.folder is not None
        name = SERVER if client is None else client
        if name in self.named:
            return None if fingerprint(self.named[name]) == signer else f"signed by {signer}, not by {name}.pub"
        nodes = {fingerprint(line) for key, line in self.named.items() if key != SERVER}
        if client is not None and signer in nodes:
            return None
        return f"signed by {signer}, which is no key of {self.folder}"
