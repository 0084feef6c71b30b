"""Privacy of the clients: noise and budgets, and what cannot be combined with them."""
