"""Certificates for TLS between nodes and server, and key pairs by which nodes are known."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from steelyard.base.errors import UserError, told_as, writable
from steelyard.proof.signing import key_pair

_DAYS, _AUTHORITY_DAYS = 365, 3650
"""How long a server certificate is good, and how long its authority, whose file every node has."""


@dataclass(frozen=True)
class Certificates:
    """Where the files of one federation's own authority lie."""

    authority: Path
    """ca.pem: give it to every node and to whoever submits runs."""
    certificate: Path
    """server.pem: the SuperLink's certificate."""
    key: Path
    """server.key: the SuperLink's private key; it stays on the SuperLink's machine."""
    authority_key: Path
    """ca.key: signs new server certificates; keep it where nobody reaches it over a network."""


def make_certificates(folder: Path, hosts: Sequence[str]) -> Certificates:
    """Make an authority and a server certificate for these host names and addresses; nothing is overwritten."""
    writable(folder, "folder")
    files = _files(folder)
    _refuse_existing(files.authority, files.certificate, files.key, files.authority_key)
    if not hosts:
        raise UserError("--host: got none; allowed: at least one name or address under which nodes reach the server")
    names = [_host(host) for host in hosts]
    authority_key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Steelyard federation")])
    authority = (
        _certificate(name, name, authority_key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    certificate, key = _server_certificate(names, name, authority_key)
    _write(files.authority, authority.public_bytes(serialization.Encoding.PEM))
    _write(files.authority_key, _pem(authority_key), secret=True)
    _write(files.certificate, certificate)
    _write(files.key, key, secret=True)
    return files


def renew_certificate(folder: Path, hosts: Sequence[str] = (), authority_key: Path | None = None) -> Certificates:
    """Sign a new server certificate by the same authority, so that nodes need no new file; the old one is replaced.

    Without hosts it is for those of the old one.
    """
    files = _files(folder)
    signer = files.authority_key if authority_key is None else authority_key
    try:
        authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
        old = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        key = serialization.load_pem_private_key(signer.read_bytes(), password=None)
        names = [_host(host) for host in hosts] or list(
            old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    except OSError as error:
        raise UserError(
            f"--renew: {error.filename} cannot be read: {error.strerror}; allowed: a folder with ca.pem, server.pem "
            "and ca.key, or --authority-key FILE where ca.key lies elsewhere"
        ) from None
    except (ValueError, TypeError, x509.ExtensionNotFound):
        raise UserError(
            f"--renew: {folder}: ca.pem, server.pem or {signer.name} is not what `steelyard federate certificates` "
            "wrote"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise UserError(f"--renew: {signer} is not the key of {files.authority}; allowed: the one made with it")
    certificate, server_key = _server_certificate(names, authority.subject, key)
    drafts = {files.key: server_key, files.certificate: certificate}
    for file, content in drafts.items():
        draft = file.with_suffix(f"{file.suffix}.new")
        draft.unlink(missing_ok=True)
        _write(draft, content, secret=file == files.key)
    for file in drafts:
        file.with_suffix(f"{file.suffix}.new").replace(file)
    return files


def days_left(folder: Path) -> float:
    """Return for how many days the server certificate of a folder is still good."""
    found = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    return (found.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _files(folder: Path) -> Certificates:
    return Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key", folder / "ca.key")


def _server_certificate(
    names: Sequence[x509.GeneralName], authority: x509.Name, authority_key: ec.EllipticCurvePrivateKey
) -> tuple[bytes, bytes]:
    """Return a new server certificate for these names, and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    # The SuperLink's own helpers reach it on its own machine, whatever its name is elsewhere.
    known = list(dict.fromkeys([*names, _host("127.0.0.1"), _host("localhost")]))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(known[0].value)[:64])])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _certificate(subject, authority, key.public_key(), _DAYS)
        .add_extension(x509.SubjectAlternativeName(known), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), _pem(key)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def check_certificates(folder: Path) -> None:
    """Refuse a folder whose certificates cannot serve: missing, unreadable, of another authority, or out of date."""
    allowed = "allowed: a folder of `steelyard federate certificates`"
    files = _files(folder)
    for file in (files.authority, files.certificate, files.key):
        if not file.is_file():
            raise UserError(f"--tls: no {file.name} in {folder}; {allowed}")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password: a key under one is refused, where OpenSSL would ask on the terminal.
        server.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, OSError) as error:
        mismatch = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        what = "server.key is not the key of server.pem" if mismatch else "server.pem or server.key cannot be read"
        raise UserError(f"--tls: {folder}: {what}; {allowed}") from None
    try:
        client = ssl.create_default_context(cafile=files.authority)
    except (ssl.SSLError, OSError):
        raise UserError(f"--tls: {folder}: ca.pem is not a certificate; {allowed}") from None
    try:
        _shake_hands(client, server)
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise UserError(f"--tls: {folder}: server.pem does not hold by ca.pem: {why}; {allowed}") from None


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Make a TLS connection in memory, as the server's helpers on its own machine do; raises what `ssl` raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    # Tried again and again, each side goes as far as it has bytes; TLS needs two turns at most of each.
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in ends * 2:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()


def make_key(file: Path) -> tuple[Path, Path]:
    """Make a node's key pair: FILE, which stays on the node, and FILE.pub, which is registered with the SuperLink."""
    if not file.name:
        raise UserError(f"file: got '{file}'; allowed: a new file")
    writable(file.parent, "file")
    public = file.with_name(file.name + ".pub")
    _refuse_existing(file, public)
    private, shown = key_pair()
    _write(file, private, secret=True)
    _write(public, shown)
    return file, public


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    # A day back: clocks of two machines need not agree to the second.
    begins = datetime.now(UTC) - timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days + 1))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if (
        len(host) > 253
        or not host.isascii()
        or not all(part and len(part) < 64 and part.replace("-", "").isalnum() for part in host.split("."))
    ):
        raise UserError(f"--host: got '{host}'; allowed: a host name or an IP address, without a port")
    return x509.DNSName(host)


def _refuse_existing(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise UserError(f"{file}: exists already; allowed: a new file (move the old one away first)")


def _write(file: Path, content: bytes, *, secret: bool = False) -> None:
    with told_as(f"{file}: cannot be written", "a writable folder"):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
