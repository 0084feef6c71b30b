"""Triton kernels of the convolutional network for stacked clients on a GPU; `available` says where they can be used."""
