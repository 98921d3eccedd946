"""`python -m d3serve` is the `d3serve` command."""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the current folder, which -m puts first: a celery.py or json.py there is not meant

from d3serve.commands.main import main

main()
