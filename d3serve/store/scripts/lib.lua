-- Shared by every script, after the prelude that defines K(name, part).
-- Redis 7.0's Lua only: no FUNCTION, cmsgpack, bit or sha1hex, and no JSON of empty tables.

local FOREVER = 9e15
local WAKE_MS = 2000
local INPUT_MS = 24 * 3600 * 1000 -- how long a job that did not succeed can be retried, if it is kept for so long
local CANCELED_INPUT_MS = 3600 * 1000
local RECORD_BYTES = 1024 -- what a job takes in Redis beside its texts, on the safe side

-- Milliseconds, and microseconds as their fraction, so that no two jobs are of one age.
local function now_fine()
  local t = redis.call('TIME')
  return t[1] * 1000 + t[2] / 1000
end

local function now_ms()
  return math.floor(now_fine())
end

-- Redis and fakeredis print large Lua numbers differently; this prints them one way.
local function int(n)
  return string.format('%.0f', n)
end

-- Redis refuses a script's first write when memory is full, but lets a script that has written go on.
-- A full queue must still be able to empty, so the scripts that empty it begin with a write that takes none.
local function write_when_full()
  redis.call('DEL', K('own'))
end

local function read(id, ...)
  local values, row = redis.call('HMGET', K('job', id), ...), {}
  for i, name in ipairs({...}) do
    row[name] = values[i] or nil
  end
  return row
end

local function tell(id, status)
  redis.call('PUBLISH', K('done'), id .. ' ' .. status)
end

-- What a worker has to tell, beside its name among the living; both are forgotten unless it says more in time.
local function say(worker, ttl_ms, ...)
  local now = now_ms()
  redis.call('HSET', K('worker', worker), ...)
  redis.call('PEXPIRE', K('worker', worker), ttl_ms)
  redis.call('ZADD', K('workers'), int(now + ttl_ms), worker)
  redis.call('ZREMRANGEBYSCORE', K('workers'), '-inf', int(now))
end

-- True when nobody has woken the lane's workers yet; the caller must then send a wake-up.
local function wants_wake(lane)
  return redis.call('ZCARD', K('ready', lane)) > 0
    and redis.call('SET', K('wake', lane), '1', 'NX', 'PX', WAKE_MS) ~= false
end

-- Groups wait on shelves: one of each lane for whoever comes, and one for each revision that jobs name.
local function shelf(lane, revision)
  return (revision or '') == '' and lane or lane .. '@' .. revision
end

-- How far a lane's tenants have come in tokens: who joins begins here, and is owed nothing for the time before.
local function pace(lane)
  return tonumber(redis.call('HGET', K('pace'), lane) or 0)
end

local function set_pace(lane, tag)
  if tag > pace(lane) then
    redis.call('HSET', K('pace'), lane, int(tag))
  end
end

-- A tenant was given work: on every shelf where it waits it stands behind those who have been given less.
local function charge(shelves, tenant, tag)
  for _, on in ipairs(shelves) do
    redis.call('ZADD', K('ring', on), 'XX', int(tag), tenant)
  end
end

-- Answers a group's lane, tenant and shelf; no lane when there is no such group.
local function place_of(group)
  local lane, tenant, revision = unpack(redis.call('HMGET', K('grp', group), 'lane', 'tenant', 'revision'))
  if lane and not tenant then -- written by a version that knew no shelves
    local first = redis.call('ZRANGE', K('pend', group), 0, 0)[1]
    tenant = first and redis.call('HGET', K('job', first), 'tenant') or ''
    redis.call('HSET', K('grp', group), 'tenant', tenant)
  end
  return lane, tenant, lane and shelf(lane, revision)
end

local function withdraw(lane, on, tenant, group)
  redis.call('ZREM', K('ready', lane), group)
  redis.call('ZREM', K('share', on .. ':' .. tenant), group)
end

-- A group waits in `ready`, and in its tenant's share of the shelf, exactly when it has waiting jobs and no owner.
local function place(group)
  if redis.call('EXISTS', K('own', group)) == 1 then
    return
  end
  local lane, tenant, on = place_of(group)
  if not lane then
    return
  end
  local head = redis.call('ZRANGE', K('pend', group), 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', K('ready', lane), head[2], group)
    redis.call('ZADD', K('share', on .. ':' .. tenant), head[2], group)
    redis.call('ZADD', K('ring', on), 'NX', int(pace(lane)), tenant)
  else
    withdraw(lane, on, tenant, group)
    redis.call('DEL', K('grp', group))
  end
end

local QUEUE_FIELDS = {'group', 'lane', 'tenant', 'revision', 'rank', 'tokens', 'bytes', 'deadline', 'state_tokens'}

-- Adds a job to what waits, or takes it away (sign -1): in its lane, and in its tenant's line there.
local function weigh(j, sign)
  local tokens = sign * (j.tokens + j.state_tokens)
  redis.call('HINCRBY', K('load', j.lane), 'tokens', int(tokens))
  redis.call('HINCRBY', K('load', j.lane), 'bytes', int(sign * j.bytes))
  if redis.call('HINCRBY', K('waiting', j.lane), j.tenant, int(tokens)) <= 0 then
    redis.call('HDEL', K('waiting', j.lane), j.tenant)
  end
end

-- One state, one lane: an interactive job pulls the group that it joins out of the offline lane.
local function enqueue(id)
  local j = read(id, unpack(QUEUE_FIELDS))
  local grp = K('grp', j.group)
  local lane = redis.call('HGET', grp, 'lane')
  if not lane or (lane == 'offline' and j.lane == 'interactive') then
    withdraw('offline', shelf('offline', j.revision), j.tenant, j.group)
    redis.call('HSET', grp, 'lane', j.lane, 'state_tokens', j.state_tokens, 'tenant', j.tenant,
      'revision', j.revision or '')
  end
  redis.call('ZADD', K('pend', j.group), j.rank, id)
  if redis.call('ZADD', K('queued', j.lane), j.rank, id) == 1 then
    redis.call('ZADD', K('line', j.lane .. ':' .. j.tenant), j.rank, id)
    weigh(j, 1)
  end
  if tonumber(j.deadline) > 0 then
    redis.call('ZADD', K('deadlines'), j.deadline, id)
  end
end

local function dequeue(id)
  local j = read(id, unpack(QUEUE_FIELDS))
  redis.call('ZREM', K('pend', j.group), id)
  if redis.call('ZREM', K('queued', j.lane), id) == 1 then
    redis.call('ZREM', K('line', j.lane .. ':' .. j.tenant), id)
    weigh(j, -1)
  end
  redis.call('ZREM', K('deadlines'), id)
end

-- What a tenant keeps in bytes: `kept` is the sum of its entries in `holds`, and each entry is counted in and out
-- exactly once, because Redis says whether it was there.
local function entry(what, tenant, bytes)
  return what .. ' ' .. int(bytes) .. ' ' .. tenant
end

-- Counts something as kept until then; again for the same thing only moves the time.
local function hold(what, tenant, bytes, till)
  if redis.call('ZADD', K('holds'), int(till), entry(what, tenant, bytes)) == 1 then
    redis.call('HINCRBY', K('kept'), tenant, int(bytes))
  end
end

local function let_go(what, tenant, bytes)
  if redis.call('ZREM', K('holds'), entry(what, tenant, bytes)) == 1
    and redis.call('HINCRBY', K('kept'), tenant, int(-bytes)) <= 0 then
    redis.call('HDEL', K('kept'), tenant)
  end
end

-- A job's entry grows and shrinks with what is kept of it.
local function hold_job(id, tenant, bytes, till)
  local before = redis.call('HGET', K('job', id), 'kept')
  if before and tonumber(before) ~= bytes then
    let_go(id, tenant, before)
  end
  redis.call('HSET', K('job', id), 'kept', int(bytes))
  hold(id, tenant, bytes, till)
end

local function state_bytes_of(group)
  local st = K('st', group)
  if redis.call('GETRANGE', st, 0, 0) == '@' then
    return tonumber(string.match(redis.call('GET', st), ' (%d+)$') or 0)
  end
  return redis.call('STRLEN', st)
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

local post_event -- in events.lua, which comes next

-- The only way into a final status: TTLs, tombstone, counters, outbox and waiters in the same step.
local function finish(id, status, now, error_json)
  local job = K('job', id)
  local j = read(id, 'group', 'tenant', 'ttl_ms', 'tomb_ms', 'lease', 'record')
  local expires = now + j.ttl_ms
  redis.call('HSET', job, 'status', status, 'finished', int(now), 'expires', int(expires))
  if error_json then
    redis.call('HSET', job, 'error', error_json)
  end
  redis.call('PEXPIRE', job, j.ttl_ms)
  bury(id, j.tenant, expires, j.ttl_ms + j.tomb_ms)
  redis.call('ZREM', K('deadlines'), id)
  if status == 'succeeded' then
    redis.call('DEL', K('body', id))
    release_state(j.group, id, j.tenant, nil)
    hold_job(id, j.tenant, (j.record or 0) + redis.call('STRLEN', K('res', id)), expires)
  else
    local input_ms = math.min(j.ttl_ms, status == 'canceled' and CANCELED_INPUT_MS or INPUT_MS)
    redis.call('PEXPIRE', K('body', id), int(input_ms))
    release_state(j.group, id, j.tenant, now + input_ms)
    hold_job(id, j.tenant, (j.record or 0) + redis.call('STRLEN', K('body', id)), now + input_ms)
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

local function return_job(id, lost, now)
  local j = read(id, 'losses', 'max_attempts', 'deadline')
  local job = K('job', id)
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
  enqueue(id)
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
