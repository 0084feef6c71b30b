"""Algorithms, one file each: what a federation does differently from FedAvg at clients, on the wire, at the server."""
