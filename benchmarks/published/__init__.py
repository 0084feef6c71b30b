"""Tables that others published, run by their protocols, and the page that holds ours against them."""
