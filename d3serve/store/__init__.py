"""The job table in Redis: the truth about every job, changed only by the Lua scripts beside this file.

`keys` spells the keys, `scripts/` holds the transitions, `jobs` is the async half that the API uses,
`turns` the sync half that workers use, `records` what both hand out.
"""
