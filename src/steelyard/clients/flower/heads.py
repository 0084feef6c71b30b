"""Signed heads on their way to the nodes: what each of them says of a node, and how far each node has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from steelyard.clients.flower.forms import HEADS, HeadsForm
from steelyard.clients.flower.requesting import Request, RequestSender
from steelyard.clients.flower.wire import content
from steelyard.proof.statements import Proof, SealedRound

LARGEST_ANSWER = 64 << 10
MOST_PROOFS = 256
"""Most proofs in one message; what is left goes with the next one."""
_MOST_KEPT = 512
"""Rounds that are held in memory for the next node: nodes are mostly equally far."""


class HeadSender:
    """Knows which proofs each node still lacks; `proofs` for a message, `arrived` once the node has answered it."""

    def __init__(self) -> None:
        self.sealed: Callable[[int], SealedRound | None] = lambda _: None
        """Where the rounds of the chain are found; none before the run says so."""
        self.reached: dict[tuple[str, str], int] = {}
        """By node (its public key) and federation: the last round of which it has the proof."""
        self.federations: set[str] = set()
        """Of which proofs were ever asked for."""
        self._kept: dict[int, SealedRound] = {}

    def proofs(self, node: str | None, federation: str) -> list[Proof]:
        """Return what a node lacks of one federation; none for a node without a key."""
        if not node:
            return []
        self.federations.add(federation)
        found: list[Proof] = []
        first = self.reached.get((node, federation), 0) + 1  # round 0 asks nobody
        for round in range(first, first + MOST_PROOFS):
            if (sealed := self._round(round)) is None:
                break
            found.append(sealed.proof(federation, node))
        return found

    def arrived(self, proofs: Sequence[Proof]) -> None:
        """Note that a node has these."""
        for proof in proofs:
            self.reached[proof.node, proof.federation] = proof.round

    def hand_out(
        self, sender: RequestSender, run: str, nodes: Mapping[int, str | None], seconds: float, round: int
    ) -> list[str]:
        """Send these nodes, by their keys, all that they still lack; returns in words who did not take it."""
        notes: list[str] = []
        while nodes:
            lacking = {node: self._all(key) for node, key in nodes.items()}
            sent = [node for node, proofs in lacking.items() if proofs]
            forms = [HeadsForm(run=run, proofs=lacking[node], seconds=seconds) for node in sent]
            requests = [
                Request(node, HEADS, content(form, {}), round, LARGEST_ANSWER)
                for node, form in zip(sent, forms, strict=True)
            ]
            answers = dict(zip(sent, sender.ask(requests, seconds), strict=True))
            silent = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
            notes += [f"node {node} did not take the last heads: {answer}" for node, answer in silent.items()]
            for node in answers.keys() - silent.keys():
                self.arrived(lacking[node])
            nodes = {node: key for node, key in nodes.items() if node in answers and node not in silent}
        return notes

    def _all(self, key: str | None) -> list[Proof]:
        return [proof for name in sorted(self.federations) for proof in self.proofs(key, name)]

    def _round(self, round: int) -> SealedRound | None:
        found = self._kept.get(round) or self.sealed(round)
        if found is not None:
            self._kept[round] = found
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return found
