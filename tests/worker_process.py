"""Start a worker whose constants a test has chosen: `worker_process.py '{"module:name.of.it": value}' [code]`.

The worker's child imports this file too, as every spawned process does its parent's main module, so both have them.
`code` is run in the main process alone.
"""

import json
import sys
from importlib import import_module

for place, value in json.loads(sys.argv[1]).items():
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    holder = import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    if not hasattr(holder, name):
        raise AttributeError(f"no constant {place}")
    setattr(holder, name, value)

if __name__ == "__main__":
    from d3serve.settings import Settings
    from d3serve.worker.main import worker_main

    exec(sys.argv[2])  # noqa: S102 - a test's own
    sys.exit(worker_main(Settings.load()))
