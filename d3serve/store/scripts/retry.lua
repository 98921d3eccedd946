-- RETRY: queue a job that ended badly again. ARGV: id, tenant.
-- Answers {'new', id, wake 0/1, lane, ''}, {'unknown'}, {'gone'} (its input) or {status} when that forbids it.
local id = ARGV[1]
local job = K('job', id)
local j = read(id, 'status', 'tenant', 'group', 'lane', 'record')
if j.tenant ~= ARGV[2] then
  return {'unknown'}
elseif j.status ~= 'failed' and j.status ~= 'canceled' and j.status ~= 'expired' then
  return {j.status}
elseif redis.call('EXISTS', K('body', id), K('st', j.group)) < 2 then
  return {'gone'}
end
redis.call('HSET', job, 'status', 'queued', 'stage', 'queued', 'losses', 0, 'deadline', 0, 'questions_done', 0)
redis.call('HDEL', job, 'finished', 'expires', 'error', 'usage', 'pass_ms', 'identity', 'started', 'lease', 'worker')
redis.call('PERSIST', job)
redis.call('PERSIST', K('body', id))
redis.call('PERSIST', K('st', j.group))
redis.call('PERSIST', K('need', j.group))
redis.call('ZADD', K('need', j.group), int(FOREVER), id)
hold(j.group, j.tenant, state_bytes_of(j.group), FOREVER)
hold_job(id, j.tenant, (j.record or 0) + redis.call('STRLEN', K('body', id)), FOREVER)
redis.call('DEL', K('gone', id))
local lane = enqueue(id, read(id, unpack(QUEUE_FIELDS)))
place(j.group)
tell(id, 'queued')
return {'new', id, wants_wake(lane, '1', j.group) and 1 or 0, lane, ''}
