"""What the thesis prints in its Tables 4.2 and 4.3, for the data sets at hand: P@10, R@10, coverage, Gini."""

from __future__ import annotations

from collections.abc import Mapping

Printed = tuple[str, str, str, str]
NAMES = ("random", "popular", "user-knn", "item-knn", "vae", "bpr-mf", "fcf", "sFPL", "sFPL+", "pFPL", "pFPL+")
BASELINE_NAMES = ("random", "popular", "user-knn", "item-knn", "bpr-mf", "fcf")


def _read(text: str) -> dict[str, Printed]:
    rows = [row.split() for row in text.strip().splitlines()]
    return {name: (row[0], row[1], row[2], row[3]) for name, row in zip(NAMES, rows, strict=True)}


THESIS: Mapping[str, Mapping[str, Printed]] = {
    "amazon": _read(
        """
        0.00005 0.00005 14186 0.28069
        0.00469 0.00603 24 0.00023
        0.01940 0.02757 4809 0.04115
        0.02147 0.03171 4516 0.03801
        0.01580 0.02289 3919 0.04179
        0.00921 0.01298 739 0.00415
        0.00839 0.01222 2655 0.01861
        0.00610 0.00889 349 0.00136
        0.01422 0.02060 2586 0.02153
        0.00812 0.01165 1052 0.00737
        – – 2614 0.02163
        """
    ),
    "italy": _read(
        """
        0.00030 0.00029 10478 0.28914
        0.04634 0.05506 19 0.00035
        0.06881 0.07833 577 0.00282
        0.04663 0.05356 3241 0.03293
        0.10421 0.21324 165 0.02336
        0.04560 0.05458 19 0.00036
        0.03126 0.03708 403 0.00158
        0.04701 0.05600 18 0.00036
        0.05595 0.06229 932 0.00789
        0.04642 0.05465 96 0.00056
        0.05565 0.06291 936 0.00725
        """
    ),
    "librarything": _read(
        """
        0.00054 0.00028 31918 0.60964
        0.05013 0.03044 36 0.00031
        0.14193 0.10115 3833 0.01485
        0.20214 0.14778 12737 0.09979
        0.10834 0.07711 7800 0.04638
        0.07009 0.04303 3082 0.01359
        0.10760 0.04392 829 0.01305
        0.06309 0.03738 1650 0.00512
        0.08512 0.05627 5404 0.02784
        0.06210 0.03643 1895 0.00760
        – – 5912 0.03133
        """
    ),
    "ml1m": _read(
        """
        0.00871 0.00283 3666 0.85426
        0.10224 0.03924 118 0.00569
        0.12613 0.06701 737 0.04636
        0.08873 0.05475 2134 0.19292
        0.11735 0.06192 1476 0.09259
        0.11911 0.05817 1444 0.08508
        0.10760 0.04392 829 0.01305
        0.11805 0.05902 1041 0.06608
        0.11599 0.05571 1326 0.02513
        0.12275 0.05806 901 0.04933
        – – 792 0.01451
        """
    ),
}
"""pFPL+'s accuracy on Amazon, LibraryThing and MovieLens is missing in the text at hand. FCF's rows for LibraryThing
and MovieLens are the same in print, which is a slip of one of them."""
TITLES: Mapping[str, str] = {
    "amazon": "Amazon Digital Music",
    "italy": "Foursquare, six cities of Italy",
    "ml1m": "MovieLens 1M",
    "librarything": "LibraryThing (a fifth of its ratings)",
    **{city: city.capitalize() for city in ("milan", "rome", "turin", "florence", "bologna", "venice")},
}
