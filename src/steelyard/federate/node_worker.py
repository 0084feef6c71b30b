"""The process that does a node's work: torch and the data are loaded once, and it stays warm between messages.

A node is two processes. One speaks to the server and never runs a model; the other does the work and may be killed: one
that hangs or dies costs its own message and is replaced. Several nodes on one machine share the process that loads
the libraries, from which every worker is forked; that of a single node does the work itself, for memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from flwr.app import Context, Error, Message, RecordDict

from steelyard.base.errors import UserError
from steelyard.base.logs import show
from steelyard.clients.flower.internals import ErrorCode, enter_run
from steelyard.clients.flower.parts import LARGEST_MESSAGE, opened, take_apart
from steelyard.clients.node import NodeConfig
from steelyard.federate.client_app import NodeFault, app, node_clients
from steelyard.federate.workers import WorkersSpec, end_with_parent, read_frame, write_frame


def answer(message: Message, context: Context) -> Message:
    """Let the client app answer one message; whatever goes wrong goes back as an error without content."""
    try:
        return app(message, context)
    except NodeFault as fault:
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(fault)), reply_to=message)
    except Exception as error:
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message)


def work(link: Connection, config: Mapping[str, Any]) -> None:
    """Answer messages until the other side is gone."""
    # It outlives a message and a run that is resumed, but not this process; a node that wants more has a state folder.
    state = RecordDict()
    while True:
        try:
            head, objects = read_frame(link.recv_bytes())
        except (EOFError, OSError):
            return
        run, node = int(head["run"]), int(head["node"])
        enter_run(run, node)
        message = opened(head["message"], objects, LARGEST_MESSAGE)
        del objects
        link.send_bytes(_packed(answer(message, Context(run, node, dict(config), state, {}))))
        if any(thread.name == "work" and thread.is_alive() for thread in threading.enumerate()):
            os._exit(0)  # What hangs cannot be ended in any other way; a fresh worker does the next message.


def _packed(reply: Message) -> bytes:
    apart = take_apart(reply)
    return write_frame({}, {"head": apart.head, "tree": apart.tree, **apart.parts})


def serve(control: socket.socket) -> NoReturn:
    """Fork a worker for each request of the process that speaks to the server, until that one is gone.

    For a single node this process becomes the worker: a fork would copy most of what Python has loaded.
    """
    nodes = WorkersSpec(**json.loads(_line(control)))
    _warm(nodes)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for workers.
    control.sendall(b"ready\n")
    while True:
        content, handles, _, _ = socket.recv_fds(control, 64, 1)
        if not content:
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.getpid() if nodes.is_single else os.fork()
        if pid:
            control.sendall(f"{pid}\n".encode())
        if pid and not nodes.is_single:
            os.close(handles[0])
            continue
        code = 1
        try:
            end_with_parent()
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # The process that speaks to the server decides.
            if nodes.threads != 1:
                torch.set_num_threads(nodes.threads or os.cpu_count() or 1)
            work(Connection(handles[0]), nodes.configs[int(content)])
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _warm(nodes: WorkersSpec) -> None:
    # Threads do not survive a fork: with one thread torch starts none.
    torch.set_num_threads(1)
    if not nodes.experiment:
        return
    for config in nodes.configs:
        with contextlib.suppress(UserError):  # The node itself will say so to the server.
            node_clients(nodes.experiment, NodeConfig.read(config))


def _line(control: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n"):
        part = control.recv(1 << 16)
        if not part:
            os._exit(0)
        text += part
    return text.decode()


def main() -> NoReturn:
    """Serve workers over the socket that was handed over: python -m steelyard.federate.node_worker FD."""
    show()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
