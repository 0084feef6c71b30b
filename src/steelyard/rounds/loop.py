"""The loop: select, train, weigh, combine, evaluate, adapt; for one federation or several side by side.

It speaks to clients and server through their protocols only, and to the store through `Recorder`. Everything that
survives a round is in RoundState, and that is what a checkpoint holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from steelyard.base.logs import doing
from steelyard.clients.protocol import Clients, Server
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import Question, Task, Updates
from steelyard.rounds.best import after_round
from steelyard.rounds.colluding import with_colluders
from steelyard.rounds.plan import SELECT, RoundValues, reached
from steelyard.rounds.private import NO_GUARANTEE, Guarantee, nobody
from steelyard.rounds.progress import SPENT
from steelyard.rounds.state import CLOCK, Draft, Federation, Plan, Recorder, RoundRecord, RoundState, States, first_like
from steelyard.rounds.testing import check_tested, choosing, evaluate
from steelyard.rounds.valuing import value_round
from steelyard.rounds.weigh import (
    Exploded,
    TooFewClients,
    fit_to_server,
    told_in_one_line,
    train_alone,
    training_fault,
    weigh_soundly,
)
from steelyard.weighing.cohort import Memory

Progress = Callable[[int, Mapping[str, float | None]], None]


def run_rounds(
    federations: Sequence[Federation],
    states: dict[str, RoundState],
    clients: Clients,
    server: Server,
    plan: Plan,
    recorder: Recorder,
    progress: Progress | None = None,
    guarantee: Guarantee = NO_GUARANTEE,
) -> dict[str, RoundState]:
    """Run all federations from their states to the last round, in lock step, and return their final states.

    With an empty `states` the run starts anew: the first models are evaluated and recorded as round 0. `guarantee`
    is that of privacy; a federation whose budget does not reach for another round rests, and so does
    one whose model exploded, unless there is no other: then the run stops.
    """
    if not states:
        states, records = _begin(federations, clients, server, plan, recorder)
        _report(progress, 0, states, records)
    begun = min(state.round for state in states.values() if not state.finished) if _active(states) else plan.rounds
    for round in range(begun + 1, plan.rounds + 1):
        active = [federation for federation in federations if not states[federation.name].finished]
        with doing(f"round {round}/{plan.rounds}"):
            records = one_round(active, states, clients, server, plan, round, guarantee)
            last = round == plan.rounds or not _active(states)
            with doing("writing it down"):
                recorder.commit(round, records, states, clients.snapshot, last=last)
        _report(progress, round, states, records)
        if last:
            break
    return states


def _active(states: States) -> bool:
    return any(not state.finished for state in states.values())


def _report(progress: Progress | None, round: int, states: States, records: Sequence[RoundRecord]) -> None:
    if progress is None:
        return
    # Where nobody tested, the last score that is known stands. Elsewhere all rows count, not those alone that choose.
    scores = {name: state.orders.reference for name, state in states.items()}
    scores |= {r.federation: r.accuracy for r in records if r.accuracy is not None and not math.isnan(r.accuracy)}
    # Rules side by side mostly spend the same: then one figure stands for all.
    spent = {r.federation: r.epsilon for r in records if r.epsilon is not None}
    if len(set(spent.values())) == 1:
        shown = {SPENT: next(iter(spent.values()))}
    else:
        shown = {f"{SPENT} of {name}": value for name, value in spent.items()}
    progress(round, {**scores, **shown})


def _begin(
    federations: Sequence[Federation], clients: Clients, server: Server, plan: Plan, recorder: Recorder
) -> tuple[dict[str, RoundState], list[RoundRecord]]:
    begun = time.perf_counter()
    with doing("building the first models"):
        states = {federation.name: federation.start(server) for federation in federations}
    # Rules that run side by side start from the same model: it is tested once for all of them.
    asked = [first_like(federation, federations, states) for federation in federations]
    questions = {
        f.name: Question(f.name, f.seed, 0, states[f.name].parameters[None], measure=plan.measure) for f in asked
    }
    with doing("testing the first models"):
        answers = dict(zip(questions, clients.evaluate(list(questions.values())), strict=True))
    records: list[RoundRecord] = []
    for place, federation in enumerate(federations):
        answer = replace(answers[asked[place].name], federation=federation.name)
        check_tested(federation, plan, answer)
        accuracy = float(answer.overall(plan.measure)[0])
        state = states[federation.name]
        reference = float(choosing(federation, answer).overall(plan.measure)[0])
        answer = replace(answer, tallies=None)
        states[federation.name] = replace(state, orders=replace(state.orders, reference=reference))
        seconds = time.perf_counter() - begun
        records.append(RoundRecord(federation.name, 0, seconds, evaluations=answer, accuracy=accuracy, loss=state.loss))
    recorder.commit(0, records, states, clients.snapshot, last=plan.rounds == 0)
    return states, records


def one_round(
    federations: Sequence[Federation],
    states: dict[str, RoundState],
    clients: Clients,
    server: Server,
    plan: Plan,
    round: int,
    guarantee: Guarantee = NO_GUARANTEE,
) -> list[RoundRecord]:
    """Do one round of every federation; `states` is brought up to date, the records say what happened."""
    begun, used = time.perf_counter(), time.process_time()
    asking = [federation for federation in federations if federation.rule.settings.trained_by == "clients"]
    tasks = [make_task(federation, states[federation.name], clients, plan, round, guarantee) for federation in asking]
    for federation in asking:
        guarantee.require(federation, round)
    # Looked at before anything is charged: a federation whose last round this is must be tested.
    ending = [f.name for f in asking if not guarantee.affords(f, (round, round + 1))]
    with doing(f"training {sum(len(task.clients) for task in tasks):,} clients"):
        answers = iter(zip(tasks, _train(asking, tasks, clients, guarantee), strict=True))
    drafts: list[Draft] = []
    exploded: dict[str, Exploded] = {}
    with doing("weighing"):
        for federation in federations:
            state = states[federation.name]
            try:
                if federation in asking:
                    task, answer = next(answers)
                    if families := clients.colluders(task.seed, round):
                        answer = with_colluders(federation, state, task, answer, families, server, plan)
                    drafts.append(weigh_soundly(federation, state, task, answer, server, plan, guarantee))
                else:
                    drafts.append(train_alone(federation, state, server, round))
            except Exploded as error:
                exploded[federation.name] = error
        _end(exploded, states, plan)
        fit_to_server([draft for draft in drafts if draft.federation.rule.settings.fit is not None], server)
    last = round == plan.rounds
    tested = drafts if last or round % plan.evaluate_every == 0 else [d for d in drafts if d.federation.name in ending]
    if tested:
        with doing("testing on all clients"):
            evaluate(tested, clients, plan, round, detailed=plan.detailed and last)
    values = _valued(drafts, clients, server, plan, round)
    records: list[RoundRecord] = []
    for draft in drafts:
        state, record = _finish(draft, server, plan, time.perf_counter() - begun)
        name = draft.federation.name
        record = replace(record, contributions=values.get(name, ()))
        if draft.federation in asking:
            record = replace(record, epsilon=guarantee.epsilon(name, coarse=not last and name not in ending))
            state = replace(state, finished=state.finished or name in ending)
        states[name] = state
        records.append(record)
    cpu, held = (time.process_time() - used) / len(federations), (time.perf_counter() - begun) / len(federations)
    return [replace(r, cpu=cpu, gpu=held if states[r.federation].parameters.is_cuda else 0.0) for r in records]


def _valued(
    drafts: Sequence[Draft], clients: Clients, server: Server, plan: Plan, round: int
) -> dict[str, tuple[RoundValues, ...]]:
    """Measure what each client added, where the plan asks for it; once orders have adapted, which changes weights."""
    if plan.contributions is None:
        return {}
    wanted = [draft for draft in drafts if plan.valued is None or draft.federation.name in plan.valued]
    with doing("measuring what each client added"):
        return {d.federation.name: value_round(d, clients, server, plan.contributions, round) for d in wanted}


def _end(exploded: Mapping[str, Exploded], states: dict[str, RoundState], plan: Plan) -> None:
    """Let federations rest whose model exploded, with the last good one; where all have ended so, the run stops."""
    for name, error in exploded.items():
        states[name] = replace(states[name], finished=True, ended=error.reason)
    if exploded and not plan.part and all(state.ended for state in states.values()):
        raise next(iter(exploded.values()))


def _train(
    asking: Sequence[Federation], tasks: Sequence[Task], clients: Clients, guarantee: Guarantee
) -> list[Updates]:
    """Have all cohorts train; what devices release of themselves is charged first, and an empty cohort asks nobody."""
    for place, federation in enumerate(asking):
        guarantee.before_training(federation, tasks[place])
    asked = [index for index, task in enumerate(tasks) if task.clients]
    with told_in_one_line(partial(training_fault, tasks)):
        answers = clients.train([tasks[index] for index in asked]) if asked else []
    found = dict(zip(asked, map(guarantee.released, answers), strict=True))
    return [
        found[index] if index in found else nobody(task.federation, task.round, task.parameters)
        for index, task in enumerate(tasks)
    ]


def make_task(
    federation: Federation,
    state: RoundState,
    clients: Clients,
    plan: Plan,
    round: int,
    guarantee: Guarantee = NO_GUARANTEE,
) -> Task:
    """Select this round's cohort by stable id and name the work; unless it is to be secret, seed and round decide."""
    names = clients.names(federation.seed)
    if federation.members is not None:
        names = [name for name in names if name in federation.members]
    if not names:
        raise TooFewClients("no client is registered; allowed: at least one client with training samples")
    algorithm = federation.algorithm
    cohort = guarantee.cohort(plan, federation, round, names, state.memory)
    return Task(
        *(federation.name, federation.seed, round, cohort, state.parameters, state.loss, algorithm),
        vectors={name: state.tensors[name] for name in algorithm.receives},
        registered=len(names),
        rate=plan.rate(round),
        waited=plan.time(round, names, state.memory)[1],
    )


def _finish(draft: Draft, server: Server, plan: Plan, seconds: float) -> tuple[RoundState, RoundRecord]:
    federation, before = draft.federation, draft.before
    loss, test = before.loss, None
    best, worse = after_round(draft, server, plan)
    adapting = federation.rule.settings.loss
    if adapting is not None and adapting.adapts:
        test = server.test(federation.seed, draft.model[None])
        loss = adapting.after(before.loss, test)
    if plan.report:
        test = server.report(federation.seed, draft.model[None], plan.measure) or test
    answer = draft.answer
    accuracy = None if answer is None else float(answer.overall(plan.measure)[0])
    finished = worse
    if plan.stop_at is not None and answer is not None:
        target, share, above = plan.stop_at
        finished = finished or bool(reached(answer.scores[0], target, share, above=above))
    if answer is not None and before.round + 1 < plan.rounds and not finished:
        # Of the last round alone the sums are kept.
        answer = replace(answer, tallies=None)
    orders = draft.orders or before.orders
    memory = _remembered(draft, plan)
    state = RoundState(before.round + 1, draft.model, loss, orders, finished, memory, tensors=draft.tensors, best=best)
    vectors = {name: before.tensors[name] for name in federation.algorithm.receives}
    macro = None if test is None or test.f1.shape[1] == 0 else float(test.f1[0].mean())
    record = RoundRecord(
        federation=federation.name,
        round=state.round,
        seconds=seconds,
        updates=draft.updates,
        weighing=draft.weighing,
        order=draft.order,
        kept_old=draft.kept_old,
        tried=draft.tried,
        tests=draft.tests,
        evaluations=answer,
        accuracy=accuracy,
        loss=before.loss,
        vectors=vectors,
        server_accuracy=None if test is None or macro is None else float(test.accuracy[0]),
        server_macro_f1=macro,
        server_metrics={
            **({} if test is None else _server_metrics(test)),
            **federation.algorithm.figures(draft.tensors),
        },
        simulated=draft.updates.simulated,
        bytes_each=sum(sent.nbytes for sent in (before.parameters, *vectors.values())),
    )
    return state, record


def _remembered(draft: Draft, plan: Plan) -> Mapping[str, Memory]:
    """Return the memory of a federation after a round: the time, and what is known of clients to choose from."""
    memory = dict(draft.memory)
    if draft.updates.simulated is not None:
        memory[CLOCK] = float(memory.get(CLOCK, 0.0)) + draft.updates.simulated
    if plan.select.by == "uniform":
        return memory
    scores = None if draft.weighing is None else draft.weighing.scores
    memory[SELECT] = plan.select.after(memory.get(SELECT, {}), draft.before.round + 1, draft.updates, scores)
    return memory


def _server_metrics(test: ServerTest) -> dict[str, float | list[float]]:
    metrics: dict[str, float | list[float]] = {name: float(values[0]) for name, values in test.errors.items()}
    if test.f1.shape[1]:
        metrics["f1"] = test.f1[0].tolist()
    return metrics
