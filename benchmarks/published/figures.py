"""What others published, as they print it: mean and standard deviation; the page names the sources."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.published.cells import SPLITS

RULES = ("FedAvg", "SCAFFOLD", "FedProx", "FedNova")
_A = {
    "mnist": """99.09 .05 99.06 .15 99.16 .04 99.05 .06
        98.89 .07 99.07 .06 99.02 .02 98.03 .06
        19.33 11.82 9.93 .12 51.79 26.75 52.58 14.08
        96.86 .30 96.92 .52 96.85 .15 96.65 .39
        97.86 .34 97.91 .10 97.85 .06 97.62 .07""",
    "fashion-mnist": """89.23 .45 89.33 .27 89.42 .09 89.36 .09
        88.09 .29 88.44 .25 88.15 .42 88.22 .12
        28.39 17.09 10.00 .00 32.65 6.68 16.86 9.30
        78.10 2.51 33.80 41.22 78.05 .99 71.67 2.34
        82.43 1.52 80.32 5.03 82.99 .48 81.97 1.34""",
    "cifar10": """71.32 .33 71.66 1.13 71.26 1.18 70.69 1.14
        62.47 .43 68.08 .96 65.63 .08 63.89 1.40
        10.00 .00 10.00 .00 12.71 .96 10.00 .00
        51.17 1.09 49.42 2.18 50.44 .79 46.9 .66
        59.11 .87 61.00 .91 59.20 1.18 57.83 .42""",
}


def _read(text: str) -> dict[str, dict[str, tuple[float, float]]]:
    lines = [[float(word) for word in line.split()] for line in text.splitlines()]
    return {
        split: {rule: (line[2 * at], line[2 * at + 1]) for at, rule in enumerate(RULES)}
        for split, line in zip(SPLITS, lines, strict=True)
    }


TABLE_A: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]] = {
    name: _read(text) for name, text in _A.items()
}
"""Flower's baseline of NIID-Bench: data set, split, rule."""
TOLERANCE = {"mnist": 0.3, "fashion-mnist": 1.0, "cifar10": 1.5}
"""Points that count as the same, where two published deviations are less."""
UNSTABLE = 5.0
"""A published deviation, in points, from which a cell counts as unstable."""
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_SAME = ((0.731, 0.022), (0.719, 0.033), (0.650, 0.114), (0.640, 0.051))
_ADAPTIVE = ((0.760, 0.018), (0.753, 0.018), (0.738, 0.028), (0.676, 0.040))
HEART: Mapping[str, tuple[tuple[float, float], ...]] = {
    "FedAvg": _SAME,
    "FedProx": _SAME,
    "SCAFFOLD": ((0.727, 0.019), *_SAME[1:]),
    "FedAdam": ((0.752, 0.017), (0.746, 0.019), (0.738, 0.028), (0.667, 0.044)),
    "FedYogi": _ADAPTIVE,
    "FedAdagrad": _ADAPTIVE,
}
"""FLamby's heart disease: accuracy at each of the hospitals, mean and deviation over seeds 42 to 46."""
