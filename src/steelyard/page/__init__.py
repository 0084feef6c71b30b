"""The live page over the runs in a folder: a small web server on this machine."""
