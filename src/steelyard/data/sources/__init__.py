"""Where data come from: a class for each source, with its settings, what it offers and how it is read."""

from steelyard.data.sources import bundled as bundled
from steelyard.data.sources import csv as csv
from steelyard.data.sources import images as images
from steelyard.data.sources import leaf as leaf
from steelyard.data.sources import npz as npz
