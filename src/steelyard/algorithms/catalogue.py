"""The table of algorithms. Importing the built-in ones here registers them: a new one is a file and a name here.

Use `known` and `load_plugins` from here, so that the built-in ones are there.
"""

from __future__ import annotations

from steelyard.algorithms import apfl as apfl
from steelyard.algorithms import client_momentum as client_momentum
from steelyard.algorithms import ditto as ditto
from steelyard.algorithms import fedala as fedala
from steelyard.algorithms import fedavg as fedavg
from steelyard.algorithms import fedavgm as fedavgm
from steelyard.algorithms import fedbn as fedbn
from steelyard.algorithms import feddyn as feddyn
from steelyard.algorithms import fedexp as fedexp
from steelyard.algorithms import fedfomo as fedfomo
from steelyard.algorithms import fednova as fednova
from steelyard.algorithms import fedopt as fedopt
from steelyard.algorithms import fedprox as fedprox
from steelyard.algorithms import fedrep as fedrep
from steelyard.algorithms import fine_tuned as fine_tuned
from steelyard.algorithms import flexlora as flexlora
from steelyard.algorithms import local_only as local_only
from steelyard.algorithms import scaffold as scaffold
from steelyard.algorithms.registry import known as known
from steelyard.algorithms.registry import load_plugins as load_plugins
