"""Everything on one machine: broker (unless there is a URL), API, worker and webhook sender in one process tree."""
