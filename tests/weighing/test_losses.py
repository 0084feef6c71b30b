"""Which loss clients use: the same always, or one of AdaFed's."""

from __future__ import annotations

import numpy as np

from steelyard.messages import LossState
from steelyard.update_payloads import ServerTest
from steelyard.weighing.adafed import BarronLoss, ClassLoss, LossSettings, loss_rule
from steelyard.weighing.losses import FixedLoss


def test_a_fixed_loss_stays_as_it_is() -> None:
    rule = FixedLoss(LossState("squared-error"))
    assert not rule.adapts
    assert rule.first() == LossState("squared-error")
    now = LossState("barron", shape=1.0)
    assert rule.after(now, ServerTest(np.ones(1), np.ones((1, 2)))) is now
    assert FixedLoss().first() == LossState("auto")


def test_settings_name_the_rule() -> None:
    assert loss_rule(None) == FixedLoss(LossState("auto"))
    assert loss_rule(None, "squared-error") == FixedLoss(LossState("squared-error"))
    assert loss_rule(LossSettings(epsilon=0.5), "cross-entropy") == ClassLoss("cross-entropy", 0.5)
    assert loss_rule(LossSettings(epsilon=0.5)) == ClassLoss("auto", 0.5)
    given = LossSettings(adapt="barron", shape=1.0, scale=3.0, adapt_scale=True, lowest=-1.0)
    assert loss_rule(given) == BarronLoss(1.0, 3.0, True, -1.0, adapts=True)
    assert loss_rule(LossSettings(adapt="none", shape=0.5, scale=3.0)) == BarronLoss(0.5, 3.0, adapts=False)
