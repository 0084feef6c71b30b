"""What does a promise of privacy cost? Accuracy over epsilon, with 300 clients and with 50.

The server adds noise, so that all models together tell at most (epsilon, delta) of any client. Prints accuracy for
each budget and draws it. Needs the extra `privacy`.
"""

import altair as alt
import pandas as pd

from steelyard import Experiment

rows = []
for clients in (300, 50):
    experiment = Experiment(
        data={"source": "digits"},
        partition={"clients": clients, "minimum": 1, "test": "none", "server": "fraction", "server_report": "same"},
        model={"name": "logistic"},
        training={"learning_rate": 0.5, "batch_size": 10},
        rounds={"count": 10, "fraction": 1.0},
        weighing={"criteria": ["EQ"], "max_shares": 1.0},  # an equal say needs the least noise
    )
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        private = experiment.changed(
            {"privacy.central": {"clip": 1.0}, "privacy.budget": {"epsilon": epsilon, "delta": 1e-3}}
        )
        last = private.run(progress=False).history.rounds.iloc[-1]
        rows.append({"clients": f"{clients} clients", "epsilon": epsilon, "accuracy": last["server_accuracy"]})
        print(f"{clients:>4} clients, epsilon {last['epsilon']:5.2f}: accuracy {last['server_accuracy']:.1%}")

chart = alt.Chart(pd.DataFrame(rows)).mark_line(point=True)
chart = chart.encode(
    alt.X("epsilon").scale(type="log", base=2).title("epsilon: less is more private"),
    alt.Y("accuracy").axis(format="%").scale(domain=[0, 1]).title("accuracy"),
    alt.Color("clients").title(None),
)
chart.properties(width=420, height=260).save("privacy_budget.svg")
