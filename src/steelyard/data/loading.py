"""From settings to a data set: one reader per source."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from steelyard.data.dataset import Dataset
from steelyard.data.settings import DataSettings
from steelyard.data.sources import sources
from steelyard.data.subset import keep_rows, share_of_rows


def load(settings: DataSettings) -> Dataset:
    """Read the data set that the settings name; use it before `share_out`."""
    dataset = _read(settings)
    # images draw their share before any picture is decoded.
    if settings.share < 1 and settings.source != "images":
        kept = share_of_rows(dataset.owners, len(dataset), settings.share, settings.seed)
        dataset = keep_rows(dataset, kept)
    return normalised(dataset, settings)


def normalised(dataset: Dataset, settings: DataSettings) -> Dataset:
    """Return the data set scaled as `data.normalise` asks; use it for data handed over from Python as well."""
    # a table's numbers are filled and scaled when it is shared out, by training rows alone.
    wanted = settings.normalise == "standard" and dataset.raw is None
    return standardised(dataset) if wanted else dataset


def _read(settings: DataSettings) -> Dataset:
    # For speed of start: each reader is imported only where its source is named.
    module, _, function = sources()[settings.source].reader.partition(":")
    return getattr(import_module(module), function)(settings)


def standardised(dataset: Dataset) -> Dataset:
    """Return the data set with mean 0 and deviation 1 per channel or column, as measured on its training part."""
    values = dataset.features.float() / 255 if dataset.features.dtype == torch.uint8 else dataset.features
    seen = values if dataset.held_out is None else values[torch.from_numpy(~dataset.held_out)]
    axes = [0, *range(2, values.ndim)]
    mean = seen.double().mean(dim=axes, keepdim=True).float()
    deviation = seen.double().std(dim=axes, keepdim=True, correction=0).float()
    deviation[deviation == 0] = 1
    return replace(dataset, features=(values - mean) / deviation)
