"""Several nodes of a federation on this machine in one process; their workers are forked with the data loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from steelyard.errors import UserError
from steelyard.federate.node import run_nodes
from steelyard.federate.node_link import Server


def main() -> int:
    """Take part as the nodes that a JSON file describes: python -m steelyard.federate.local_nodes FILE."""
    document: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    servers = [Server(one["address"], _path(one["authority"]), _path(one["key"])) for one in document["servers"]]
    try:
        run_nodes(servers, document["configs"], experiment=document["experiment"], threads=1)
    except UserError as error:
        print(f"steelyard: {error}", flush=True)
        return 2
    return 0


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


if __name__ == "__main__":
    sys.exit(main())
