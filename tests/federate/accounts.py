"""Another account of this machine, and calls that it makes; only root can take one."""

from __future__ import annotations

import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NOBODY = 65_534


def as_nobody(work: Callable[[], str]) -> str:
    """Return what some work says that is done in a process of another account."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said


def post(port: int, path: str, body: bytes, tls: ssl.SSLContext | None = None) -> str:
    """Return the first line of the answer to a call; nothing where the connection is ended without one."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        stream = plain if tls is None else tls.wrap_socket(plain, server_hostname="127.0.0.1")
        with stream:
            try:
                stream.sendall(head.encode() + b"accept: application/protobuf\r\nconnection: close\r\n\r\n" + body)
                return stream.recv(200).decode("latin-1").partition("\r\n")[0]
            except OSError:
                return ""


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signed(key: ec.EllipticCurvePrivateKey, stamp: str | None = None) -> dict[str, str]:
    """Return the headers of a node's call, signed now or at another time."""
    stamp = stamp or datetime.now(UTC).isoformat()
    signature = key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": b64encode(pem(key)).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": b64encode(signature).decode(),
        "content-type": "application/protobuf",
        "accept": "application/protobuf",
    }
