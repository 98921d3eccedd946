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
write_when_full()
-- A clock that was set back would let a dead worker's lease run on by as much.
local leases = redis.call('ZRANGE', K('leases'), 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local most = tonumber(redis.call('HGET', K('lease', leases[i]), 'ms') or FOREVER)
  if leases[i + 1] - now > most then
    redis.call('ZADD', K('leases'), int(now + most), leases[i])
  end
end
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', K('leases'), '-inf', int(now), 'LIMIT', 0, LIMIT)) do
  local back, dead, lanes = free_lease(lease, true, now)
  freed, ended = freed + 1, ended + math.max(dead, 0)
  for _, lane in ipairs(lanes) do
    wake(lane)
  end
end
if freed > 0 then
  tally('leases:reaped', freed)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K('deadlines'), '-inf', int(now), 'LIMIT', 0, LIMIT)) do
  redis.call('ZREM', K('deadlines'), id)
  local status = redis.call('HGET', K('job', id), 'status')
  if status == 'queued' or status == 'running' then
    expire(id, status, now)
    ended = ended + 1
  end
end
-- What has gone by itself is no longer counted: of a job first its input, then the rest.
for _, held in ipairs(redis.call('ZRANGEBYSCORE', K('holds'), '-inf', int(now), 'LIMIT', 0, 10 * LIMIT)) do
  local what, bytes, tenant = string.match(held, '^(%S+) (%d+) (.*)$')
  local j = read(what, 'expires', 'record')
  if j.expires and tonumber(j.expires) > now then
    hold_job(what, tenant, tonumber(j.record or 0), j.expires)
  else
    let_go(what, tenant, bytes)
    redis.call('ZREM', K('jobs', tenant), what)
    redis.call('ZREM', K('batches', tenant), what)
  end
end
-- Whatever else takes keys away must not be counted for ever: some are looked at each time.
for _, held in ipairs(redis.call('ZRANDMEMBER', K('holds'), 4)) do
  local what, bytes, tenant = string.match(held, '^(%S+) (%d+) (.*)$')
  if redis.call('EXISTS', K('job', what), K('st', what), K('piece', what), K('batch', what)) == 0 then
    let_go(what, tenant, bytes)
  end
end
for _, lane in ipairs(ARGV) do
  if wants_wake(lane) then
    wake(lane)
  end
end
return {freed, ended, wakes}
