"""Every policy against numbers from the code that its authors published, run outside this repository on these cohorts.

Each test names the repository and the commit. Functions were called as they are (with "cuda" read as "cpu"); lines that
stand in a training script and cannot be called were typed again around the authors' helpers, in their precision. Of
pull requests only the text was at hand: FedSCS, trust-mad and nvflare-adaptive were typed again from it as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from tests.weighing.policies.cohorts import LATER, LATER_LOSSES, LOSSES, MODELS, SKEWED, START, cohort, weighed

from steelyard.weighing.cohort import Memory
from steelyard.weighing.policies.afl import Afl
from steelyard.weighing.policies.cgsv import Cgsv
from steelyard.weighing.policies.fedawa import FedAwa
from steelyard.weighing.policies.fedce import FedCe
from steelyard.weighing.policies.feddg_ga import adjusted
from steelyard.weighing.policies.feddisco import FedDisco
from steelyard.weighing.policies.fedlaw import FedLaw
from steelyard.weighing.policies.fedscs import FedScs
from steelyard.weighing.policies.foolsgold import FoolsGold, unlike
from steelyard.weighing.policies.nvflare_adaptive import NvflareAdaptive
from steelyard.weighing.policies.q_fedavg import QFedAvg
from steelyard.weighing.policies.shapfed import ShapFed
from steelyard.weighing.policies.term import Term
from steelyard.weighing.policies.trust_mad import TrustMad
from steelyard.weighing.policy import nearest_shares


def test_feddisco() -> None:
    """MediaBrain-SJTU/FedDisco f3ea299: disco.get_distribution_difference ("kl"), disco_weight_adjusting."""
    assert weighed(FedDisco(), cohort()) == pytest.approx([0.7654549361364172, 0.23454506386358276, 0], abs=1e-12)
    mild = weighed(FedDisco(a=0.2, b=0.0), cohort())
    assert mild == pytest.approx([0.7265721023666939, 0.2734278976333061, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("q", "model"),
    [
        (
            0.0,
            [0.46666667113701504, -0.8666666746139526, 0.25, 1.83333333333, 0.1666666716, -0.4999999925],
        ),
        (
            2.5,
            [0.48357743930896957, -1.0013546608577306, 0.27423592, 2.00148940, 0.02452225439, -0.51938873],
        ),
    ],
)
def test_q_fedavg(q: float, model: list[float]) -> None:
    """litian96/fair_flearn f097971: the lines of qffedavg.Server.train, then norm_grad and aggregate2; rate 0.1."""
    weights = weighed(QFedAvg(q=q), cohort())
    found = START.double().numpy() + weights @ (MODELS.double() - START.double()).numpy()
    assert found == pytest.approx(model, abs=1e-8)


def test_afl() -> None:
    """litian96/fair_flearn f097971: the lines of afl.Server.train on λ, and model_utils.project; rate 0.5."""
    expected = [[1 / 3, 1 / 3, 1 / 3], [0.35, 0.6, 0.05], [0.4, 0.6, 0.0], [0.275, 0.725, 0.0]]
    view = cohort()
    for losses, mixture in zip([LOSSES, LATER_LOSSES, LOSSES, LOSSES], expected, strict=True):
        view = cohort(losses=losses, memory=view.remembered)
        assert weighed(Afl(rate=0.5), view) == pytest.approx(mixture, abs=1e-12)


def test_term() -> None:
    """litian96/TERM ac3c01d: the lines of fair_flearn's tilting.Server.train, over two rounds."""
    policy, view = Term(t=2.0, smooth=0.5), cohort()
    first = [0.4975772911474492, 1.3525553087799866, 0.149867400072564]
    assert weighed(policy, view) == pytest.approx(first, abs=1e-12)
    second = [0.6195034366, 0.5072065151, 0.4152655721]
    assert weighed(policy, cohort(losses=LATER_LOSSES, memory=view.remembered)) == pytest.approx(second, abs=1e-9)


def test_feddg_ga() -> None:
    """MediaBrain-SJTU/FedDG-GA 8d03a24: weight_adjust.refine_weight_dict_by_GA by losses, twice."""
    once = adjusted(np.full(3, 1 / 3), np.array([0.7, -0.1, 0.2]), 0.2)
    assert once == pytest.approx([0.3716814159292036, 0.3008849557522124, 0.32743362831858414], abs=1e-12)
    twice = adjusted(once, np.array([-0.1, 0.6, 0.1]), 0.15)
    assert twice == pytest.approx([0.34604579294844784, 0.3341761483354403, 0.31977805871611176], abs=1e-12)


def test_shapfed() -> None:
    """tnurbek/shapfed 5771a37: main_cifar10.compute_cssv_cifar with two classes, and its lines on μ = 0.9."""
    view = cohort()
    assert weighed(ShapFed(), view) == pytest.approx([0.7553441111654029, 0.1011152300148907, 0.1435406588], abs=1e-6)
    again = weighed(ShapFed(), cohort(LATER, memory=view.remembered))
    assert again == pytest.approx([0.7640912961546361, 0.06553898864629212, 0.1703697151990], abs=1e-6)


def test_fedlaw() -> None:
    """ZexiLee/ICML-2023-FedLAW 47f7a72: server_funct.fedlaw_optimization ("exp", Adam) on one batch, in float32."""
    found = weighed(FedLaw(steps=45, rate=0.005), cohort())
    assert found.sum() == pytest.approx(0.8619228005409241, abs=2e-6)
    assert found / found.sum() == pytest.approx([0.64918375, 0.24246997, 0.10834633], abs=2e-6)


def test_fedawa() -> None:
    """ChanglongShi/FedAWA 50244a6: server_funct.fedawa (Adam, "cos"), five steps in each of two rounds, in float32."""
    view = cohort()
    model = weighed(FedAwa(steps=5), view) @ MODELS.double().numpy()
    expected = [
        0.48553651571273804,
        -0.8686054944992065,
        0.27850642800331116,
        1.797417163848877,
        0.202698022,
        -0.522805094,
    ]
    assert model == pytest.approx(expected, abs=1e-6)
    later = cohort(LATER, memory=view.remembered)
    weighed(FedAwa(steps=5), later)
    kept = later.remembered["fedawa/values"]
    assert kept == pytest.approx({"a": 0.6100068092346191, "b": 0.28999194502830505, "c": 0.089995577}, abs=1e-6)


def test_cgsv() -> None:
    """XinyiYS/Gradient-Driven-Rewards-… 7376663: the lines of main.py on normalised gradients, Γ = 0.5, α = 0.95."""
    view = cohort()
    step = weighed(Cgsv(), view) @ (MODELS - START).double().numpy()
    expected = [
        0.031154833734035492,
        0.0951261818408966,
        0.05237354710698128,
        -0.210505589842,
        0.193790733814,
        -0.041898831,
    ]
    assert step == pytest.approx(expected, abs=1e-6)
    later = cohort(LATER, memory=view.remembered)
    step = weighed(Cgsv(), later) @ (LATER - START).double().numpy()
    expected = [
        -0.09821980446577072,
        0.03688027709722519,
        0.21852177381515503,
        -0.2475372999,
        0.164006322622,
        0.0487319231,
    ]
    assert step == pytest.approx(expected, abs=1e-6)
    reputation = {"a": 0.8113633394241333, "b": 0.1613345891237259, "c": 0.02730204164981842}
    assert later.remembered["cgsv/reputation"] == pytest.approx(reputation, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "plus",
            [
                [0.269070009526721, 0.3700348401942005, 0.3608951502790785],
                [0.24107269748701723, 0.3930370300393481, 0.3658902724736347],
                [0.2286259722785925, 0.4091527661486773, 0.3622212615727302],
            ],
        ),
        (
            "times",
            [
                [0.2048066857201087, 0.40673634705506767, 0.3884569672248236],
                [0.1559978503733723, 0.44724109885946367, 0.396761050767164],
                [0.14293134294699297, 0.47838758666870734, 0.37868107038429977],
            ],
        ),
    ],
)
def test_fedce(mode: str, expected: list[list[float]]) -> None:
    """NVIDIA/NVFlare f3b7c1b: nvflare/app_opt/pt/fedce.FedCEModelAggregator over three rounds, in float32."""
    policy = FedCe(mode=mode)  # type: ignore[arg-type]
    memory: Mapping[str, Memory] = {}
    scores = [{"a": 0.8, "b": 0.6, "c": 0.7}, {"a": 0.9, "b": 0.5, "c": 0.75}, {}]
    for models, weights, after in zip([MODELS, LATER, MODELS], expected, scores, strict=True):
        view = cohort(models, memory=memory)
        assert weighed(policy, view) == pytest.approx(weights, abs=1e-6)
        memory = {**view.remembered, **policy.after_tests(view.remembered, after)}


def test_trust_mad() -> None:
    """flwrlabs/flower 3c681a3 (pull request 7335): customagg/strategy.py, typed again, on six norms."""
    measures = {"DS": np.array([10.0, 20, 30, 40, 50, 60]), "UL": np.array([1.0, 1.2, 0.9, 1.1, 2.0, 9.0])}
    strict = TrustMad().weigh(measures, cohort())
    assert strict / strict.sum() == pytest.approx([1 / 15, 2 / 15, 3 / 15, 4 / 15, 5 / 15, 0], abs=1e-12)
    mild = TrustMad(beta=0.5, z=1.0).weigh(measures, cohort())
    expected = [
        0.08356801445648042,
        0.16713602891296084,
        0.25070404336944124,
        0.3342720578259217,
        0.164318380971,
        1.4744e-6,
    ]
    assert mild / mild.sum() == pytest.approx(expected, abs=1e-9)


def test_foolsgold() -> None:
    """DistributedML/FoolsGold d50d935: model_aggregator.foolsgold without weights of features, typed again."""
    six = np.array([[1, 0, 0], [1, 0.1, 0], [0, 1, 0], [0.2, 0.9, 0.3], [0, 0, 1], [-1, 0.2, 0.4]], dtype=np.float64)
    assert unlike(six).tolist() == [0, 0, 0, 0, 1, 1]
    memory: dict[str, Memory] = {}
    # In the second round the histories count: the sums of both updates.
    for models, weights in ((MODELS, [1 / 3] * 3), (LATER, [0.30090288, 0.39819424, 0.30090288])):
        view = cohort(models, memory=memory)
        assert weighed(FoolsGold(), view) == pytest.approx(weights, abs=1e-8)
        memory = view.remembered
    # By hand: cosines 0.6, 0 and 0, so α is 0.4, 0.4 and 1.
    pair = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.0, 1.0]])
    assert unlike(pair) == pytest.approx([np.log(0.4 / 0.6) + 0.5] * 2 + [1.0], abs=1e-12)
    assert not unlike(np.ones((3, 2))).any(), "the same from all: Sybils"


def test_fedscs() -> None:
    """NVIDIA/NVFlare, pull request 5240: FedSCSAggregator._compute_scs, typed again, three rounds."""
    first = torch.tensor([[1.0, 0.5, 0, 0.2, 0, 0], [0.8, 0.1, 0.3, 0, 0, 0], [0.2, 0.9, -0.4, 0.1, 0, 0]]) + START
    second = torch.tensor([[0.5, 0.5, 0.1, 0.2, 0, 0], [0.9, -0.3, 0.3, 0, 0, 0], [0.4, 0.7, 0.2, -0.5, 0, 0]]) + START
    expected = [
        [0.5657861890556368, 0.2701545602687205, 0.16405925067564264],
        [0.4769270374090223, 0.2552516159773537, 0.26782134661362395],
        [0.4794108938393719, 0.2751980055455068, 0.24539110061512134],
    ]
    memory: Mapping[str, Memory] = {}
    for models, weights in zip([first, second, first], expected, strict=True):
        view = cohort(models, memory=memory)
        assert weighed(FedScs(), view) == pytest.approx(weights, abs=1e-6)
        memory = view.remembered


def test_nvflare_adaptive() -> None:
    """NVIDIA/NVFlare, pull request 5273: AdaptiveHeterogeneityPolicy.compute with its gates, retyped from its text."""
    view = cohort(counts=SKEWED)
    sizes = [0.6, 0.3, 0.1]
    moved = [0.5967082561370368, 0.3012792704014361, 0.10201247346152721]
    for weights in (sizes, sizes, sizes, moved, moved):
        assert weighed(NvflareAdaptive(), view) == pytest.approx(weights, abs=1e-12)
        view = cohort(counts=SKEWED, memory=view.remembered)
    eager = NvflareAdaptive(delta=0.4, warmup=0, patience=1, most=1.0, prior=0.0, fairness=2.0)
    expected = [0.5691387237526946, 0.3314890768072947, 0.09937219944001069]
    assert weighed(eager, cohort(counts=SKEWED)) == pytest.approx(expected, abs=1e-12)


def test_the_bounds_of_nvflare_adaptive() -> None:
    """The same pull request's project_bounded_simplex."""
    assert nearest_shares(np.array([0.7, 0.2, 0.1]), 0.15, 0.5) == pytest.approx([0.5, 0.3, 0.2])
    assert nearest_shares(np.array([0.7, 0.25, 0.05]), 0.1, 0.45) == pytest.approx([0.45, 0.375, 0.175])
    assert nearest_shares(np.array([0.9, 0.6, -0.4])) == pytest.approx([0.65, 0.35, 0.0])
    # Bounds that leave no choice.
    assert nearest_shares(np.array([0.9, 0.1]), 0.6, 1.0) == pytest.approx([0.5, 0.5])
    assert nearest_shares(np.array([0.9, 0.1]), 0.0, 0.4) == pytest.approx([0.5, 0.5])
