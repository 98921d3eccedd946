-- How jobs and leases end: only for scripts that end them. Comes after lib.lua, before events.lua.

-- What /metrics tells of the whole queue since it was made; `tally.py` reads it.
local function tally(what, count)
  redis.call('HINCRBY', K('tally'), what, count)
end

-- Notes a time, as `observe` in tally.py. A clock that was set back makes it no less than nothing.
local function observe(what, label, ms)
  local time, under = math.max(0, ms), 1
  while under <= #BOUNDS_MS and time > BOUNDS_MS[under] do
    under = under + 1
  end
  tally(what .. ':' .. label .. ':' .. (BOUNDS_MS[under] or 'inf'), 1)
  tally(what .. ':' .. label .. ':us', int(time * 1000))
end

-- The state lives as long as the last job that may still read it; `till` nil: this job never will.
-- Jobs that no longer may are dropped here: the key of a state that is always wanted never expires as a whole.
local function release_state(group, id, tenant, till)
  local need, st = K('need', group), K('st', group)
  redis.call('ZREMRANGEBYSCORE', need, '-inf', int(now_ms()))
  if till then
    redis.call('ZADD', need, int(till), id)
  else
    redis.call('ZREM', need, id)
  end
  local last = redis.call('ZRANGE', need, -1, -1, 'WITHSCORES')
  if not last[1] then
    let_go(group, tenant, state_bytes_of(group))
    redis.call('DEL', st, need)
  elseif tonumber(last[2]) < FOREVER then
    hold(group, tenant, state_bytes_of(group), tonumber(last[2]))
    redis.call('PEXPIREAT', st, int(tonumber(last[2])))
    redis.call('PEXPIREAT', need, int(tonumber(last[2])))
  end
end

local function bury(id, tenant, expires, ttl_ms)
  redis.call('SET', K('gone', id), int(expires) .. ' ' .. tenant, 'PX', int(ttl_ms))
end

local KEEP_INPUT_MS = {canceled = CANCELED_INPUT_MS, succeeded = ANSWERED_INPUT_MS}
local post_event -- in events.lua, which comes next

-- The only way into a final status: TTLs, tombstone, counters, outbox and waiters in the same step.
-- What succeeded keeps its input for a while only on `keep_input`: nobody needs it but who reads it back.
local function finish(id, status, now, error_json, keep_input)
  local job = K('job', id)
  local j = read(id, 'group', 'tenant', 'ttl_ms', 'tomb_ms', 'lease', 'record')
  local expires = now + j.ttl_ms
  local record = (j.record or 0) + redis.call('STRLEN', K('res', id))
  redis.call('HSET', job, 'status', status, 'finished', int(now), 'expires', int(expires), 'record', int(record))
  if error_json then
    redis.call('HSET', job, 'error', error_json)
  end
  redis.call('PEXPIRE', job, j.ttl_ms)
  bury(id, j.tenant, expires, j.ttl_ms + j.tomb_ms)
  redis.call('ZREM', K('deadlines'), id)
  if status == 'succeeded' and not keep_input then
    redis.call('DEL', K('body', id))
    release_state(j.group, id, j.tenant, nil)
    hold_job(id, j.tenant, record, expires)
  else
    local input_ms = math.min(j.ttl_ms, KEEP_INPUT_MS[status] or INPUT_MS)
    redis.call('PEXPIRE', K('body', id), int(input_ms))
    release_state(j.group, id, j.tenant, now + input_ms)
    hold_job(id, j.tenant, record + redis.call('STRLEN', K('body', id)), now + input_ms)
  end
  if j.lease then
    redis.call('SREM', K('leasejobs', j.lease), id)
  end
  redis.call('HINCRBY', K('finished'), status, 1)
  post_event(id, status, now, error_json)
  tell(id, status)
end

local function failure(code, message)
  return cjson.encode({code = code, message = message, retryable = false})
end

local function expire(id, status, now)
  if status == 'queued' then
    local group = redis.call('HGET', K('job', id), 'group')
    dequeue(id)
    place(group)
    finish(id, 'expired', now, failure('job_expired', 'the job had not started when expires_in_s had passed'))
  else
    finish(id, 'expired', now, failure('job_expired', 'the job ran longer than its timeout_s'))
  end
end

-- Takes one waiting job under a lease.
local function take(id, lease, worker, now)
  local job = K('job', id)
  local timeout = tonumber(redis.call('HGET', job, 'timeout_ms'))
  dequeue(id)
  redis.call('HSET', job, 'status', 'running', 'lease', lease, 'worker', worker, 'started', int(now),
    'stage', 'preparing', 'questions_done', '0')
  redis.call('HDEL', job, 'fraction', 'eta_s')
  redis.call('HINCRBY', job, 'attempt', 1)
  redis.call('SADD', K('leasejobs', lease), id)
  if timeout > 0 then
    redis.call('ZADD', K('deadlines'), int(now + timeout), id)
  end
  tell(id, 'running')
end

-- What a worker gets of jobs that it has taken from a group: their state once, the rest of each, of those that are there.
local function handed(group, ids)
  local jobs = {}
  for _, id in ipairs(ids) do
    local body, tenant = redis.call('GET', K('body', id)), redis.call('HGET', K('job', id), 'tenant')
    if body and tenant then
      local rest = redis.call('HMGET', K('job', id), 'model', 'attempt', 'on_error', 'asked_lane', 'created', 'lane',
        'traceparent', 'started')
      jobs[#jobs + 1] = {id, body, tenant, unpack(rest, 1, 8)}
    end
  end
  return {group, redis.call('GET', K('st', group)), jobs}
end

local function return_job(id, lost, now)
  local j = read(id, 'losses', 'max_attempts', 'deadline')
  local job = K('job', id)
  tally(lost and 'attempts:lost' or 'attempts:returned', 1)
  redis.call('ZREM', K('deadlines'), id)
  if lost then
    local losses = redis.call('HINCRBY', job, 'losses', 1)
    if losses >= tonumber(j.max_attempts) then
      finish(id, 'failed', now, failure('max_attempts',
        'the worker died or lost its lease in each of ' .. j.max_attempts .. ' attempts'))
      return 'dead'
    end
  else
    redis.call('HINCRBY', job, 'attempt', -1)
  end
  if tonumber(j.deadline) > 0 and now >= tonumber(j.deadline) then
    finish(id, 'expired', now, failure('job_expired', 'expires_in_s passed before the job could run again'))
    return 'dead'
  end
  redis.call('HSET', job, 'status', 'queued', 'stage', 'queued', 'questions_done', '0')
  redis.call('HDEL', job, 'lease', 'worker', 'started', 'fraction', 'eta_s')
  enqueue(id, read(id, unpack(QUEUE_FIELDS)))
  tell(id, 'queued')
  return 'back'
end

-- Ends a lease: its unfinished jobs wait again, as a lost attempt or as given back unharmed. Of a turn that was lost in
-- a pass only the jobs of that pass are suspects: their neighbours in the turn lose no attempt. A turn that waited while
-- a short one overtook it was not the one that ran: it is given back.
-- Answers (jobs back, jobs that ended, lanes to wake); (-1, 0, {}) when the lease has ended already.
local function free_lease(lease, lost, now)
  if redis.call('ZREM', K('leases'), lease) == 0 then
    return -1, 0, {}
  end
  local running, in_a_pass = {}, false
  lost = lost and redis.call('HGET', K('lease', lease), 'waits') ~= '1'
  for _, id in ipairs(redis.call('SMEMBERS', K('leasejobs', lease))) do
    local j = read(id, 'status', 'lease', 'stage')
    if j.status == 'running' and j.lease == lease then
      running[#running + 1] = {id = id, deciding = j.stage == 'deciding'}
      in_a_pass = in_a_pass or j.stage == 'deciding'
    end
  end
  local count = {back = 0, dead = 0}
  for _, job in ipairs(running) do
    local fate = return_job(job.id, lost and (job.deciding or not in_a_pass), now)
    count[fate] = count[fate] + 1
  end
  local wakes, seen = {}, {}
  for _, group in ipairs(redis.call('SMEMBERS', K('leasegrps', lease))) do
    local lane = redis.call('HGET', K('grp', group), 'lane')
    redis.call('DEL', K('own', group))
    place(group)
    if lane and not seen[lane] then
      seen[lane] = true
      if wants_wake(lane) then
        wakes[#wakes + 1] = lane
      end
    end
  end
  redis.call('DEL', K('lease', lease), K('leasejobs', lease), K('leasegrps', lease))
  return count.back, count.dead, wakes
end
