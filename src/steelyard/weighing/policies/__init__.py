"""Weights by others: rules with a name of their own, one file each with its equation and where it comes from.

Importing them here registers them: a new one is a file and a name here.
"""

from __future__ import annotations

from steelyard.weighing.policies import afl as afl
from steelyard.weighing.policies import cgsv as cgsv
from steelyard.weighing.policies import fedawa as fedawa
from steelyard.weighing.policies import fedce as fedce
from steelyard.weighing.policies import feddg_ga as feddg_ga
from steelyard.weighing.policies import feddisco as feddisco
from steelyard.weighing.policies import fedlaw as fedlaw
from steelyard.weighing.policies import fedscs as fedscs
from steelyard.weighing.policies import foolsgold as foolsgold
from steelyard.weighing.policies import nvflare_adaptive as nvflare_adaptive
from steelyard.weighing.policies import q_fedavg as q_fedavg
from steelyard.weighing.policies import shapfed as shapfed
from steelyard.weighing.policies import term as term
from steelyard.weighing.policies import trust_mad as trust_mad
