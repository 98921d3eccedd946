-- HOOK_CLAIM: take due deliveries for a while; one that is not settled by then is due again.
-- Every tenant that has some gets an equal share, who was served last comes last. ARGV: how many, lease_ms.
-- Answers their ids.
local now, most = now_ms(), tonumber(ARGV[1])
write_when_full()

-- What an earlier version left: '<job id>:<event>', told as its job is now.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', K('hooks_due'), '-inf', int(now), 'LIMIT', 0, most)) do
  local job = string.match(member, '^[^:]+')
  local j = read(job, 'status', 'finished', 'error')
  if j.finished then
    post_event(job, j.status, j.finished, j.error)
  end
  redis.call('ZREM', K('hooks_due'), member)
end

local tenants = redis.call('ZRANGEBYSCORE', K('outboxes'), '-inf', int(now), 'LIMIT', 0, most)
local share, claimed = math.max(1, math.floor(most / math.max(1, #tenants))), {}
for _, tenant in ipairs(tenants) do
  local outbox = K('outbox', tenant)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', outbox, '-inf', int(now), 'LIMIT', 0, share)) do
    redis.call('ZADD', outbox, int(now + ARGV[2]), id)
    claimed[#claimed + 1] = id
  end
  local head = redis.call('ZRANGE', outbox, 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', K('outboxes'), int(math.max(now, head[2])), tenant)
  else
    redis.call('ZREM', K('outboxes'), tenant)
  end
end
return claimed
