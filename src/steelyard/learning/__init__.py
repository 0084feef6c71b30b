"""Models, losses, local training and evaluation; knows nothing of federations."""
