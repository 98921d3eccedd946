-- REAP: what has to happen without anybody asking. ARGV: lane ...
-- Frees leases that ran out, ends overdue jobs, finds lanes whose wake-up was lost.
-- Answers {leases freed, jobs ended, {lanes to wake}}.
local LIMIT = 100
local now, freed, ended, wakes, seen = now_ms(), 0, 0, {}, {}
local function wake(lane)
  if not seen[lane] then
    seen[lane] = true
    wakes[#wakes + 1] = lane
  end
end
drain()
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', K('leases'), '-inf', int(now), 'LIMIT', 0, LIMIT)) do
  local back, dead, lanes = free_lease(lease, true, now)
  freed, ended = freed + 1, ended + math.max(dead, 0)
  for _, lane in ipairs(lanes) do
    wake(lane)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K('deadlines'), '-inf', int(now), 'LIMIT', 0, LIMIT)) do
  redis.call('ZREM', K('deadlines'), id)
  local status = redis.call('HGET', K('job', id), 'status')
  if status == 'queued' or status == 'running' then
    expire(id, status, now)
    ended = ended + 1
  end
end
for _, lane in ipairs(ARGV) do
  if redis.call('LLEN', K('mq', lane)) == 0 and wants_wake(lane) then
    wake(lane)
  end
end
return {freed, ended, wakes}
