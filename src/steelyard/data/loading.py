"""From settings to a data set: one reader per source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import torch

from steelyard.base.errors import UserError
from steelyard.data.dataset import Dataset, keep_rows, share_of_rows
from steelyard.data.settings import DataSettings
from steelyard.data.source_settings import AugmentSettings
from steelyard.data.sources import sources
from steelyard.learning.augmentation import Augmentation


def load(settings: DataSettings) -> Dataset:
    """Read the data set that the settings name; use it before `share_out`."""
    dataset = _read(settings)
    # images draw their share before any picture is decoded.
    if settings.share < 1 and settings.source != "images":
        kept = share_of_rows(dataset.owners, len(dataset), settings.share, settings.seed)
        dataset = keep_rows(dataset, kept)
    return normalised(dataset, settings)


def normalised(dataset: Dataset, settings: DataSettings) -> Dataset:
    """Return the data set scaled as `data.normalise` asks, with what changes its images while they are trained on.

    Use it for data handed over from Python as well.
    """
    # a table's numbers are filled and scaled when it is shared out, by training rows alone.
    wanted = settings.normalise == "standard" and dataset.raw is None
    if wanted and dataset.tokens:
        raise UserError("data.normalise: got 'standard' for rows of tokens; allowed: unit, which leaves them alone")
    if settings.augment is None:
        return standardised(dataset)[0] if wanted else dataset
    return augmented(dataset, settings.augment, standard=wanted)


def augmented(dataset: Dataset, settings: AugmentSettings, *, standard: bool) -> Dataset:
    """Return the data set normalised as asked, with the draws of `[data.augment]` to come."""
    augment = Augmentation(settings.pad, settings.padding, settings.flip)
    if dataset.task == "segmentation" and (settings.pad or settings.flip):
        raise UserError(
            "data.augment: got pad or flip with masks, which would not move along; allowed: mean, deviation"
        )
    augment.check(dataset.shape)
    given = settings.mean, settings.deviation
    if any(len(part) not in (0, dataset.shape[0]) for part in given):
        raise UserError(
            f"data.augment: got {len(given[0])} in mean and {len(given[1])} in deviation for images of "
            f"{dataset.shape[0]} channels; allowed: a number for each channel"
        )
    if standard or given[0]:
        dataset, black = standardised(dataset, None if standard else given)
        augment = replace(augment, black=tuple(black.flatten().tolist()))
    return replace(dataset, augment=augment if augment.pad or augment.flip else None)


def _read(settings: DataSettings) -> Dataset:
    # For speed of start: each reader is imported only where its source is named.
    module, _, function = sources()[settings.source].reader.partition(":")
    return getattr(import_module(module), function)(settings)


def standardised(
    dataset: Dataset, given: tuple[Sequence[float], Sequence[float]] | None = None
) -> tuple[Dataset, torch.Tensor]:
    """Return the data set with mean 0 and deviation 1 per channel or column, and what became of 0 in each.

    Both are measured on its training part, or given for each channel.
    """
    values = dataset.features.float() / 255 if dataset.features.dtype == torch.uint8 else dataset.features
    if given is not None:
        mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in given)
    else:
        seen = values if dataset.held_out is None else values[torch.from_numpy(~dataset.held_out)]
        axes = [0, *range(2, values.ndim)]
        mean = seen.double().mean(dim=axes, keepdim=True).float()
        deviation = seen.double().std(dim=axes, keepdim=True, correction=0).float()
        deviation[deviation == 0] = 1
    return replace(dataset, features=(values - mean) / deviation), -mean / deviation
