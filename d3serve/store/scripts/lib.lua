-- Shared by every script, after the prelude that defines K(name, part).
-- Redis 7.0's Lua only: no FUNCTION, cmsgpack, bit or sha1hex, and no JSON of empty tables.

local FOREVER = 9e15
local WAKE_MS = 2000
local INPUT_MS = 24 * 3600 * 1000 -- how long a job that did not succeed can be retried, if it is kept for so long
local CANCELED_INPUT_MS = 3600 * 1000
local ANSWERED_INPUT_MS = 3600 * 1000 -- how long what succeeded can be read back, where there is room
local RECORD_BYTES = 1024 -- what a job takes in Redis beside its texts, on the safe side

-- Milliseconds, and microseconds as their fraction, so that no two jobs are of one age. A script is one step, at one time.
local time_of_step
local function now_fine()
  if not time_of_step then
    local t = redis.call('TIME')
    time_of_step = t[1] * 1000 + t[2] / 1000
  end
  return time_of_step
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

-- Calls a worker that waits for work of the lane without Celery: the one that holds the group's state, if it waits.
-- Another would read it again, or leave it to that one and call it. Whether there was one.
local function call_idle(lane, group)
  local now, holder = now_ms(), group and redis.call('GET', K('warm', group))
  local worker = holder and tonumber(redis.call('ZSCORE', K('idle', lane), holder) or 0) >= now and holder
    or redis.call('ZRANGEBYSCORE', K('idle', lane), int(now), '+inf', 'LIMIT', 0, 1)[1]
  if not worker then
    return false
  end
  redis.call('ZREM', K('idle', 'interactive'), worker)
  redis.call('ZREM', K('idle', 'offline'), worker)
  redis.call('LPUSH', K('call', worker), lane)
  redis.call('PEXPIRE', K('call', worker), WAKE_MS)
  return true
end

-- Sees to it that somebody hears of the lane's work. True when the caller must send a wake-up for it: nobody has sent
-- one that is still out, and no worker could be called. `group`, where it is one that has brought it.
local function wants_wake(lane, hops, group)
  return redis.call('ZCARD', K('ready', lane)) > 0
    and redis.call('LLEN', K('mq', lane)) == 0
    and redis.call('SET', K('wake', lane), hops or '1', 'NX', 'PX', WAKE_MS) ~= false
    and not call_idle(lane, group)
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
local function place_on(group, lane, tenant, on)
  if redis.call('EXISTS', K('own', group)) == 1 then
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

local function place(group)
  local lane, tenant, on = place_of(group)
  if lane then
    place_on(group, lane, tenant, on)
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
-- `j` has the QUEUE_FIELDS of the job. Answers the lane of its group.
local function enqueue(id, j)
  local grp = K('grp', j.group)
  local lane = redis.call('HGET', grp, 'lane')
  if not lane or (lane == 'offline' and j.lane == 'interactive') then
    if lane then
      withdraw('offline', shelf('offline', j.revision), j.tenant, j.group)
    end
    lane = j.lane
    redis.call('HSET', grp, 'lane', lane, 'state_tokens', j.state_tokens, 'tenant', j.tenant,
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
  return lane
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
