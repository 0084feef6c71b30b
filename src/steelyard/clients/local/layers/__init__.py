"""Layers that compute what torch's do, in a form that stacks of clients can be trained in."""
