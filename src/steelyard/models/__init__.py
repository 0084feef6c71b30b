"""Models that left their run: folders with weights, network, preparation and card; predictions and tests by them."""
