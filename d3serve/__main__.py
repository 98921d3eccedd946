"""`python -m d3serve` is the `d3serve` command."""

from d3serve.cli import main

main()
