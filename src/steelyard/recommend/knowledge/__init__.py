"""What a knowledge graph says of items: readers, exploration to several hops, and the features that come of it."""
