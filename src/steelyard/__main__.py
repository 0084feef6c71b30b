"""`python -m steelyard` is the same as the command `steelyard`."""

from steelyard.cli.main import main

main()
