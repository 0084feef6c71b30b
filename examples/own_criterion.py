"""A criterion of one's own: prefer clients that hold rare digits, beside FedAvg on the same cohorts."""

from steelyard import Experiment, LocalData, client_criterion


@client_criterion("RARE", description="holds the digits 8 or 9")
def holds_rare_digits(local: LocalData) -> bool:
    """A boolean criterion: it counts 1 or 0 before it is normalised over the cohort."""
    return bool((local.labels >= 8).any())


experiment = Experiment.load("quickstart").changed(
    {
        "rounds.count": 10,
        "weighing": {"criteria": ["RARE", "DS"], "score": "prioritized", "priority": "RARE>DS"},
    }
)
result = experiment.run()
for rule in result.summary["rules"]:
    print(f"{rule['rule']:>8}: accuracy {rule['accuracy']:.1%}, worst tenth {rule['worst_tenth']:.1%}")
