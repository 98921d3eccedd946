-- HOOK_CLAIM: take due deliveries for a while; one that is not settled by then is due again.
-- ARGV: how many, lease_ms. Answers their ids.
local now = now_ms()
drain()

-- A member that an earlier version left: told as its job is now.
local function adopt(member, job)
  local j = read(job, 'status', 'finished', 'error')
  if j.finished then
    post_event(job, j.status, j.finished, j.error)
  end
  redis.call('ZREM', K('hooks_due'), member)
end

for _, member in ipairs(redis.call('ZRANGEBYSCORE', K('hooks_due'), '-inf', int(now), 'LIMIT', 0, tonumber(ARGV[1]))) do
  local job = string.match(member, '^(.*):job%.%l+$')
  if job then
    adopt(member, job)
  end
end
local due = redis.call('ZRANGEBYSCORE', K('hooks_due'), '-inf', int(now), 'LIMIT', 0, tonumber(ARGV[1]))
for _, id in ipairs(due) do
  redis.call('ZADD', K('hooks_due'), int(now + ARGV[2]), id)
end
return due
