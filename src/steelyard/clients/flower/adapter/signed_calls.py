"""A node's calls, signed as Flower's SuperLink wants it, by the server's clock; repeated where the server is busy."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from steelyard import __version__
from steelyard.clients.flower.news import WAIT_HEADER

CLOCK_HEADER, VERSION_HEADER = "steelyard-clock", "steelyard-version"
"""What a node says of itself beside Flower's own headers: by how much its clock is ahead, and its version."""
_REPEATED = ("pull-object", "push-object", "confirm-message-received")
"""Calls in the middle of a task: to give up one of them is to give up the task. Who makes the others tries again."""
_REPEAT_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 0.2, 2.0
_UNAUTHORIZED, _BUSY = 401, 503
_HOLD_SECONDS = 20.0
"""How long our call for a message may be held where there is none."""
_COARSE_SECONDS, _LEAST_DRIFT = 2.0, 3.0
"""The server writes whole seconds, and looks at its clock once a second, later where it is busy."""


class SignedCalls:
    """Signs each call with a node's key and the time; for a client of Flower's.

    A SuperLink refuses signatures from more than five seconds ahead of its clock. So the time is the server's, as its
    answers give it. A call in the middle of a task is repeated for a while, but not once `stop` is set.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, stop: threading.Event) -> None:
        self._key, self._stop = key, stop
        pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self._public = b64encode(pem).decode("ascii")
        self.ahead = 0.0
        """By how many seconds our clock is ahead of the server's; 0 where they agree."""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send one call; Flower's client asks for this method."""
        before = self.ahead
        response = self._patiently(context, call_next)
        if response.status_code == _UNAUTHORIZED and self.ahead != before:
            response = self._patiently(context, call_next)
        return response

    def _patiently(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        deadline, pause = time.monotonic() + _REPEAT_SECONDS, _FIRST_PAUSE
        repeated = context.request.url.path.endswith(_REPEATED)
        while True:
            # Who is to stop waits for no server: it may be gone for good, as where one process killed both.
            last = not repeated or self._stop.is_set() or time.monotonic() > deadline
            try:
                response = self._send(context, call_next)
                if last or response.status_code != _BUSY:
                    return response
            except httpx.ConnectError:
                if last:
                    raise
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _send(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        stamp = (local_time() - timedelta(seconds=self.ahead)).isoformat()
        signature = self._key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        context.request.headers.update(
            {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: stamp,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
                CLOCK_HEADER: f"{self.ahead:g}",
                VERSION_HEADER: __version__,
                WAIT_HEADER: f"{_HOLD_SECONDS:g}",
            }
        )
        begun = local_time()
        response = call_next(context)
        self._learn(response.headers.get("date", ""), begun)
        return response

    def _learn(self, date: str, begun: datetime) -> None:
        """Compare clocks: the server wrote its time between our call and its answer, however long that took."""
        try:
            theirs = parsedate_to_datetime(date)
            least = (begun - theirs).total_seconds() - _COARSE_SECONDS
            most = (local_time() - theirs).total_seconds()
        except (ValueError, TypeError):
            return
        if not least <= self.ahead <= most:
            ahead = 0.0 if least <= 0 <= most else round((least + most) / 2)
            self.ahead = float(ahead) if abs(ahead) >= _LEAST_DRIFT else 0.0


def local_time() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(UTC)
