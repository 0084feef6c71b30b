"""Weighing inside NVFlare: `WeighedAggregator` is an aggregator for its recipes that weighs clients by a rule.

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from steelyard.nvflare import WeighedAggregator

recipe = FedAvgRecipe(min_clients=6, num_rounds=10, model=Net(), train_script="client.py",
                      aggregator=WeighedAggregator("VP>DS/max", rows=CleanRows("clean.npz")))
"""

# Only packages of ours are imported here, never their files: NVFlare copies the files that a component imports into
# every job, and the server has Steelyard installed.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard import UserError
from steelyard.adapters import ClientTest, Collected, Combined, Journal, Model, Reply, ServerRows, Site, WeighedRounds

try:
    from nvflare.apis.client_engine_spec import ClientEngineSpec
    from nvflare.apis.dxo import from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.app_event_type import AppEventType
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils
except ImportError as error:
    raise UserError(
        f"steelyard.nvflare: {error}; install NVFlare, 2.7 or newer (tried up to 2.9): pip install 'steelyard[nvflare]'"
    ) from None

__all__ = ["ServerRows", "WeighedAggregator"]


class WeighedAggregator(ModelAggregator):
    """An aggregator of NVFlare's in which a rule weighs the clients; use it as `aggregator=` of FedAvg's recipes.

    `rule`: in the words of `steelyard compare --rules`. Criteria that clients measure come from their model's metrics
    or meta by name, DS from its meta `size`. MD, AG, VP and the like are computed here, from the models and from
    `rows`, which is of a class of your own: a `ServerRows` whose constructor takes plain values and keeps them as
    attributes, since NVFlare makes it anew where the job runs. Names that are no criteria are given in `metrics`.
    A client that cannot be weighed is left out; `rounds` keeps weights, measures and reasons of every round. With a
    `folder`, every round is also written there as a run for `steelyard report`, `watch` and `weigh`; `measure` names
    the clients' metric that is their score there. Large updates wait for the others in temporary files, in
    `temporary` or where the machine has such files.

        >>> aggregator = WeighedAggregator("LD>DS")

    Raises:
        UserError: the rule is no text, is not known or steers training itself, or `folder` holds another
            run.
    """

    # NVFlare writes a component down by the attributes that are named as its constructor's arguments.
    def __init__(
        self,
        rule: str = "DS",
        rows: ServerRows | None = None,
        metrics: Sequence[str] = (),
        plugins: Sequence[str] = (),
        size: str = FLMetaKey.NUM_STEPS_CURRENT_ROUND,
        folder: str | None = None,
        measure: str = "accuracy",
        keep_models: bool = False,
        temporary: str | None = None,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.rows = rows
        self.metrics = metrics
        self.plugins = plugins
        self.size = size
        self.folder = folder
        self.measure = measure
        self.keep_models = keep_models
        self.temporary = temporary
        self.rounds: list[Combined] = []
        """What came of each round: weights, scores, measures, and why clients were left out; models are not kept."""
        if not isinstance(rule, str):
            raise UserError(f"rule: got {type(rule).__name__}; allowed: words, which NVFlare can write into a job")
        self._weighing = WeighedRounds(rule, rows, self.metrics, self.plugins)
        # The model that is sent is the workflow's own: it cannot be replaced here.
        self._journal = Journal(self._weighing, folder, "NVFlare", measure, keep_models, replaces=False)
        self._site: Site | None = None
        """In a swarm: the site that this is."""
        self._failure: UserError | None = None
        self._lock = Lock()
        self._sent: Mapping[str, Any] | None = None
        self._collected: Collected | None = None
        self._as_change: bool | None = None
        """Whether the first answer that was taken in is a change; so is then what comes of the round."""
        self._metrics: dict[str, dict[str, float]] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Note the model that is sent to the clients, since updates are measured against it; close the folder."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN and isinstance(fl_ctx.get_engine(), ClientEngineSpec):
            self._become_site(fl_ctx)
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            # Whichever thread it comes from; the folder is closed where it was opened.
            self._failure = UserError(str(fl_ctx.get_prop(FLContextKey.EVENT_DATA)))
        elif event_type == EventType.END_RUN and self._failure is not None:
            self._journal.stop(self._failure)
        elif event_type == EventType.END_RUN:
            self._journal.close()
        if event_type == AppEventType.BEFORE_TRAIN_TASK:
            task = fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE)
            if isinstance(task, Shareable):
                self._sent = from_shareable(task).data

    def _become_site(self, fl_ctx: FLContext) -> None:
        try:
            folder = None if self.folder is None else Path(self.folder)
            self._site = Site(self._weighing, folder, str(fl_ctx.get_identity_name()), self.measure)
        except UserError as error:
            self.system_panic(str(error), fl_ctx)

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Take a client's answer in; the workflows ScatterAndGather and swarm learning ask for it so."""
        self.fl_ctx = fl_ctx
        model = FLModelUtils.from_shareable(shareable, fl_ctx)
        # The name that NVFlare has authenticated, whatever the client wrote. A swarm's aggregating site hands its own
        # answer to itself, and that answer names nobody.
        peer = fl_ctx.get_peer_context()
        own = "?" if peer is None else peer.get_identity_name("?")
        model.meta["client_name"] = shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, own)
        return self.accept_model(model)

    def accept_model(self, model: FLModel) -> bool:
        """Take one client's model in; what is kept of it is its update, on the disk where it is large."""
        client = str((model.meta or {}).get("client_name", "?"))
        with self._lock:
            collected = self._begun()
            try:
                reason = self._add(collected, client, model)
            except UserError as error:
                reason = str(error)
                collected.refuse(client, reason)
        return not reason

    def _add(self, collected: Collected, client: str, model: FLModel) -> str:
        if not isinstance(model.params, dict) or not model.params:
            collected.refuse(client, "sent no arrays by name")
            return collected.reasons[client]
        known = {**(model.meta or {}), **(model.metrics or {})}
        asked = {name: _number(known[name]) for name in self._weighing.asked if name in known}
        size = _number(known[self.size]) if self.size in known else None
        if size is None and self._weighing.needs_samples:
            collected.refuse(client, f"meta {self.size} is missing")
            return collected.reasons[client]
        arrays: dict[str, NDArray[Any]] = {}
        for name, value in model.params.items():
            try:
                arrays[str(name)] = _numpy(value)
            except (ValueError, TypeError, RuntimeError) as error:
                raise UserError(f"array {name} cannot be read: {error}") from None
        is_change = model.params_type == ParamsType.DIFF
        reason = collected.add(Reply(client, arrays, 1.0 if size is None else size, asked, is_change))
        if not reason:
            self._as_change = is_change if self._as_change is None else self._as_change
            self._metrics[client] = {n: _number(v) for n, v in (model.metrics or {}).items() if _is_number(v)}
        return reason

    def aggregate_model(self) -> FLModel:
        """Weigh the clients and return what they make together; where none can be weighed, the model stays."""
        with self._lock:
            collected = self._begun()
            assert self._sent is not None
            self._open()
            as_change = bool(self._as_change)
            combined = collected.combine(as_change=as_change)
            sent, metrics = self._sent, self._metrics
            self._sent = None
            self._forget()
        meta = self._write(combined, sent, metrics, as_change)
        for client, reason in combined.reasons.items():
            self.warning(f"left out {client}: {reason}")
        if combined.arrays is None:
            self.warning("no client could be weighed: the model stays as it is")
            return FLModel(params_type=ParamsType.FULL, params=dict(sent), meta=meta)
        self.info(f"weights by {self._weighing.name}: { {c: round(w, 4) for c, w in combined.weights.items()} }")
        return FLModel(
            params_type=ParamsType.DIFF if as_change else ParamsType.FULL,
            params={name: _like(sent[name], array) for name, array in combined.arrays.items()},
            metrics=combined.means(metrics) or None,
            meta=meta,
        )

    def _open(self) -> None:
        """Open the folder before anything is weighed: criteria go on with what they remembered in it."""
        if self._site is not None:
            handed = self._learnt().get("meta") or {}
            if fault := self._site.take_up(handed):
                self.warning(fault)
            return
        planned = self.fl_ctx.get_prop(AppConstants.NUM_ROUNDS) if self.fl_ctx else None
        begins = Model({str(name): _numpy(value) for name, value in (self._sent or {}).items()})
        self._journal.open(lambda: begins, planned if isinstance(planned, int) else None)

    def _write(
        self, combined: Combined, sent: Mapping[str, Any], metrics: Mapping[str, Mapping[str, float]], as_change: bool
    ) -> dict[str, str]:
        """Note the round, and write the one before: clients tested its model when they got it in this round.

        Returns what is to go with the new model.
        """
        self.rounds.append(replace(combined, arrays=None))
        found = {client: each[self.measure] for client, each in metrics.items() if self.measure in each}
        if self._site is not None:
            return self._site.hand_on(combined, found, self.rule)
        if self.folder is None:
            return {}
        if self._journal.pending is not None:
            self._journal.pending.tests = {c: ClientTest(score) for c, score in found.items() if math.isfinite(score)}
        made = {name: _numpy(_like(sent[name], array)) for name, array in (combined.arrays or {}).items()}
        before = {str(name): _numpy(value) for name, value in sent.items()}
        whole = {name: before[name] + array for name, array in made.items()} if as_change else made
        self._journal.end_round(replace(combined, arrays=None), Model(whole or before))
        return {}

    def _learnt(self) -> Mapping[str, Any]:
        """Return the model that the workflow has sent, with its meta; empty where it says none."""
        return (self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL) if self.fl_ctx else None) or {}

    def reset_stats(self) -> None:
        """Forget the answers of a round; what criteria remember from round to round stays."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._collected, self._as_change, self._metrics = None, None, {}

    def _begun(self) -> Collected:
        """Return the round under way; the first answer begins it."""
        if self._sent is None:
            self._sent = self._learnt().get("weights")
        if not self._sent:
            raise UserError(
                "aggregator: has not seen the model that was sent to the clients; allowed: NVFlare's own workflows "
                "(FedAvg, ScatterAndGather), or one that fires BEFORE_TRAIN_TASK"
            )
        if self._collected is None:
            arrays = {str(name): _numpy(value) for name, value in self._sent.items()}
            self._collected = self._weighing.begin(arrays, None if self.temporary is None else Path(self.temporary))
        return self._collected


def _numpy(value: Any) -> NDArray[Any]:
    """Return an array of any kind that NVFlare sends; types that numpy has not are widened, and lose nothing by it."""
    value = value.materialize() if callable(getattr(value, "materialize", None)) else value
    if not torch.is_tensor(value):
        return np.asarray(value)
    value = value.detach().cpu()
    numpy_has_it = not value.is_floating_point() or value.dtype in (torch.float16, torch.float32, torch.float64)
    return (value if numpy_has_it else value.float()).numpy()


def _like(sent: Any, array: NDArray[Any]) -> Any:
    """Return an array as the kind of thing that was sent: a tensor of its type, or an array."""
    return torch.from_numpy(array).to(sent.dtype) if torch.is_tensor(sent) else array


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) or (torch.is_tensor(value) and value.numel() == 1)


def _number(value: Any) -> float:
    """Return a client's measure; what is no number becomes NaN, and is refused with its name."""
    try:
        return float(value) if _is_number(value) else math.nan
    except OverflowError:
        return math.inf
