"""Looks in whatever Flower is on the path for all that a federation needs, for test_internals.py."""

from __future__ import annotations

import flwr
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore import constant
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.grid import HttpGrid

from steelyard.clients.flower import calls, internals, parts, signatures, superlink

NODE = {"node": {"node_id": 1}}
PART = {**NODE, "run_id": 1, "object_id": "a"}
ASKED = {
    "CONTROL": {
        "ListRuns": {"run_id": 1},
        "StopRun": {"run_id": 1},
        "RegisterNode": {"public_key": b"1", "name": "a"},
    },
    "FLEET": {
        "ActivateNode": {"public_key": b"1", "heartbeat_interval": 1.0},
        "DeactivateNode": {"node_id": 1},
        "RegisterNode": {"public_key": b"1"},
        "UnregisterNode": {"node_id": 1},
        "SendNodeHeartbeat": {**NODE, "heartbeat_interval": 1.0},
        "PullMessages": NODE,
        "PushMessages": {**NODE, "clientapp_runtime_list": [1.0]},
        "PullObject": PART,
        "PushObject": {**PART, "session_id": "s", "object_content": b"1"},
        "ConfirmMessageReceived": {**NODE, "run_id": 1, "message_object_id": "a"},
    },
}

for service, methods in ASKED.items():
    made = calls.Calls(getattr(internals, service), "127.0.0.1:1", None, "a")
    for method, fields in methods.items():
        assert made.asked(method, **fields).SerializeToString()
assert len(internals.handlers()) == 12
assert isinstance(vars(HttpGrid)["_runtime_client"], property)
assert callable(SuperLinkLifespan._start_superexec_if_needed)
assert signatures.KEY_HEADER == constant.FLEET_HTTP_PUBLIC_KEY_HEADER
assert signatures.SIGNATURE_HEADER == constant.FLEET_HTTP_SIGNATURE_HEADER
assert (signatures.TIME_HEADER, superlink._TASK_HEADER) == (TIMESTAMP_HEADER, constant.TASK_TOKEN_HEADER)
internals.enter_run(1, 7)
message = Message(RecordDict({"form": ConfigRecord({"json": "text"})}), 7, "train.task", ttl=1.0)
apart = parts.take_apart(message)
assert message.metadata.message_id in apart.parts
print(flwr.__file__)
