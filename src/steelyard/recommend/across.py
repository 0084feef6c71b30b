"""FPL across machines: the users of one node, and their sparse rows on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from flwr.app import Array
from numpy.typing import NDArray

from steelyard.clients.flower import payloads
from steelyard.clients.flower.arrays import unpack
from steelyard.clients.flower.forms import Refused
from steelyard.clients.place import Hosted, Place
from steelyard.errors import UserError
from steelyard.messages import Payload
from steelyard.recommend.clients import RecommendClients, RecommendServer, Users
from steelyard.recommend.prepared import Prepared, cut, kept, put_together
from steelyard.recommend.sampling import Histories
from steelyard.recommend.sparse import PairRows, SparseRows

if TYPE_CHECKING:
    from steelyard.recommend.experiment import RecommendExperiment

_MOST_ITEMS = 10**8


def host(experiment: RecommendExperiment, place: Place) -> Hosted:
    """Build the users that live at a place: their histories and vectors, and nobody else's."""
    _refuse_turns(experiment)
    payloads.register(sparse_codec(experiment.fpl.learning_rate, experiment.fpl.factors + 1, experiment.triples()))
    if place.own_data:
        clients = experiment.clients_of(_own(experiment, place))
    else:
        if place.data is not None:
            path = experiment.interactions.model_copy(update={"path": place.data})
            experiment = experiment.model_copy(update={"interactions": path})
        clients, _ = experiment.assemble()
    names = place.choose(clients.names(experiment.seed))
    return Hosted(_restricted(clients, names, place), names, {"items": clients.users.histories.catalogue})


def _own(experiment: RecommendExperiment, place: Place) -> Prepared:
    """Prepare a node's own file: its users' rows and nobody else's, with items numbered by a public catalogue."""
    settings = experiment.interactions
    if settings.core or settings.min_item or settings.catalogue is None or place.data is None:
        raise UserError(
            "node config data: a node with only its own users' rows knows neither others' items nor how often they are "
            "taken; allowed: interactions.catalogue = a file of all items, and core and min_item 0"
        )
    data = kept(place.data, settings)
    return put_together(data, cut(data, settings), settings, experiment.items, experiment.fpl, experiment.ranking)


def serve(experiment: RecommendExperiment, about: Mapping[str, int | list[int]]) -> RecommendServer:
    """Build the server from what the nodes say; it needs the interactions only to count triples and epochs."""
    _refuse_turns(experiment)
    items = about.get("items")
    if not isinstance(items, int) or not 0 < items <= _MOST_ITEMS:
        raise UserError(f"federate: the nodes do not say how many items there are, but {dict(about)}")
    payloads.register(sparse_codec(experiment.fpl.learning_rate, experiment.fpl.factors + 1, experiment.triples()))
    return RecommendServer(items, experiment.fpl.factors)


def _refuse_turns(experiment: RecommendExperiment) -> None:
    if experiment.one_by_one:
        raise UserError(
            f"fpl.mode: '{experiment.fpl.mode}' takes one-user rounds by the epoch, in one process; allowed across "
            "machines: pFPL, pFPL+, or custom (fraction and triples as you like)"
        )


def _restricted(clients: RecommendClients, names: Sequence[str], place: Place) -> RecommendClients:
    facts = {name: {**place.device, **place.user} for name in names}
    users = replace(keep_users(clients.users, names), facts=facts)
    return RecommendClients(
        *(users, clients.learning, clients.protocol),
        cutoff=clients.cutoff,
        score=clients.score,
        criteria=clients.criteria,
        threads=clients.threads,
    )


def keep_users(users: Users, names: Sequence[str]) -> Users:
    """Return only these users; the numbering of items stays."""
    histories, ground = users.histories, users.ground
    wanted = set(names)
    places = np.array([i for i, name in enumerate(histories.names) if name in wanted], dtype=np.int64)
    number = np.full(histories.users, -1, dtype=np.int64)
    number[places] = np.arange(len(places))
    entries = np.repeat(number, histories.drawn_from) >= 0
    starts = np.concatenate([[0], np.cumsum(histories.drawn_from[places])]).astype(np.int64)
    trained, tested = number[ground.train_user], number[ground.test_user]
    kept = Histories(
        names=tuple(histories.names[place] for place in places.tolist()),
        catalogue=histories.catalogue,
        starts=starts,
        items=histories.items[entries],
        fakes=histories.fakes[places],
    )
    judged = replace(
        ground,
        users=len(places),
        train_user=trained[trained >= 0],
        train_item=ground.train_item[trained >= 0],
        test_user=tested[tested >= 0],
        test_item=ground.test_item[tested >= 0],
        liked=None if ground.liked is None else ground.liked[trained >= 0],
    )
    return Users(kept, judged, users.shares[places], users.kinds[entries], users.facts)


def sparse_codec(rate: float, width: int, triples: int) -> payloads.Codec:
    """Return how sparse rows travel: each row of a user once, with its item's number.

    The server's α and the width of a row come from the experiment, never from a message; a user sends at most two
    rows per triple.
    """
    most = 2 * triples

    def read(arrays: Mapping[str, Array], clients: int, parameters: torch.Tensor) -> Payload:
        payloads.only_keys(arrays, ["owners", "rows", "values"])
        owners = unpack(arrays["owners"], "owners", "<i4", (None,))
        rows = unpack(arrays["rows"], "rows", "<i4", (len(owners),))
        values = unpack(arrays["values"], "values", "<f4", (len(owners), width))
        _refuse_places(owners, rows, clients, parameters.numel() // width, most)
        return SparseRows(clients, owners.copy(), rows.copy(), values.copy(), rate)

    return payloads.Codec(
        kind="sparse",
        payload=(SparseRows, PairRows),
        pack=_pack,
        unpack=read,
        join=_join,
        largest=lambda clients, parameters: clients * most * 4 * (width + 2) + 12_288,
    )


def _refuse_places(owners: NDArray[Any], rows: NDArray[Any], clients: int, items: int, most: int) -> None:
    for name, places, count in (("owners", owners, clients), ("rows", rows, items)):
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < count:
            raise Refused(f"array {name}: {int(places.min())} to {int(places.max())}; allowed: 0 to {count - 1}")
    keys = owners.astype(np.int64) << 32 | rows
    if not (np.diff(keys) > 0).all():
        raise Refused("array rows: not ascending by user and item, or a row twice; allowed: each row once, in order")
    if len(owners) and int(np.bincount(owners).max()) > most:
        raise Refused(f"array rows: {int(np.bincount(owners).max())} rows of one user; allowed: at most {most}")


def _pack(payload: SparseRows | PairRows) -> dict[str, NDArray[Any]]:
    rows = payload.sent()
    return {"owners": rows.owners, "rows": rows.rows, "values": rows.values}


def _join(parts: Sequence[Any], order: Sequence[int]) -> Payload:
    many = cast(Sequence[SparseRows], parts)
    firsts = np.cumsum([0, *(part.clients for part in many)])
    return SparseRows(
        clients=int(firsts[-1]),
        owners=np.concatenate([part.owners + first for part, first in zip(many, firsts, strict=False)]).astype(
            np.int32
        ),
        rows=np.concatenate([part.rows for part in many]),
        values=np.concatenate([part.values for part in many]),
        rate=many[0].rate,
    ).select(order)
