"""The tables of docs/results/kgflex.md from the cells that were measured (placeholder)."""


def pages(cells):
    return []
