"""KGFlex: recommendations from the features that drive each user's choices, with private views of shared features."""
