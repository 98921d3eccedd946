-- Webhook events: what is told of a job is fixed in the step in which it happens. Comes after ends.lua.
-- `delivery` is the line of the log; `told` the event itself, gone once it is delivered or its owner erases the job.

local KEEP_MS = 7 * 86400 * 1000
local INLINE_BYTES = 16000 -- a larger result stays behind its address
local MAX_LOGGED = 10000 -- deliveries listed per tenant

local function event_id(job, ordinal)
  return 'msg_' .. string.gsub(job, '^job_', '') .. '_' .. ordinal
end

-- Each tenant has an outbox, and a place among those to be served, no later than its first delivery is due.
local function due_at(tenant, id, ms)
  redis.call('ZADD', K('outbox', tenant), ms, id)
  redis.call('ZADD', K('outboxes'), 'LT', ms, tenant)
end

-- Bytes of undelivered events, by delivery and as a sum: a tenant's receivers may not fill the server.
local function count_open(tenant, id, bytes)
  local open = K('hooks_open', tenant)
  local known = redis.call('HGET', open, id) or 0
  redis.call('HINCRBY', open, 'total', int(bytes - known))
  if bytes > 0 then
    redis.call('HSET', open, id, bytes)
  else
    redis.call('HDEL', open, id)
  end
end

-- The oldest lines make room; one that is still due leaves the list only, and its key once it is settled.
local function log_delivery(tenant, id, created)
  local log = K('hooks_of', tenant)
  redis.call('ZADD', log, created, id)
  redis.call('PEXPIRE', log, KEEP_MS)
  for _, old in ipairs(redis.call('ZRANGE', log, 0, -MAX_LOGGED - 1)) do
    redis.call('ZREM', log, old)
    if not redis.call('ZSCORE', K('outbox', tenant), old) then
      redis.call('DEL', K('delivery', old), K('told', old))
    end
  end
end

-- Makes a delivery of `data`, due now; the fields say of what and to whom.
local function open_delivery(id, tenant, data, now, ...)
  redis.call('HSET', K('delivery', id), 'tenant', tenant, 'state', 'pending', 'created', int(now), ...)
  redis.call('SET', K('told', id), data, 'PX', KEEP_MS)
  due_at(tenant, id, int(now))
  count_open(tenant, id, #data)
  log_delivery(tenant, id, int(now))
end

-- Ends a delivery. Only what a receiver never took is kept, so that it can be sent again.
local function close_delivery(id, state)
  local row = K('delivery', id)
  local tenant, created = unpack(redis.call('HMGET', row, 'tenant', 'created'))
  observe('webhook', state, now_ms() - created)
  redis.call('HSET', row, 'state', state)
  redis.call('HDEL', row, 'due')
  redis.call('PEXPIRE', row, KEEP_MS)
  redis.call('ZREM', K('outbox', tenant), id)
  if state == 'delivered' or state == 'erased' then
    redis.call('DEL', K('told', id))
  end
  count_open(tenant, id, 0)
  log_delivery(tenant, id, created)
end

-- Erases what the deliveries of a job hold; the log keeps its lines, and nothing is sent any more.
local function erase_events(job)
  for ordinal = 1, tonumber(redis.call('GET', K('events', job)) or 0) do
    local id = event_id(job, ordinal)
    redis.call('DEL', K('told', id))
    if redis.call('HGET', K('delivery', id), 'state') == 'pending' then
      close_delivery(id, 'erased')
    end
  end
end

local function seconds(ms)
  return string.format('%d.%03d', math.floor(ms / 1000), ms % 1000)
end

-- The event's `data`, of texts that are JSON already.
local function event_data(job, j, status, now, error_json)
  local parts = {
    '"id":"' .. job .. '","status":"' .. status .. '","attempt":' .. j.attempt,
    '"created_at":' .. seconds(j.created) .. ',"finished_at":' .. seconds(now),
    '"metadata":' .. j.metadata,
    '"urls":{"self":"/v1/jobs/' .. job .. '","result":"/v1/jobs/' .. job .. '/result"}',
  }
  if error_json then
    parts[#parts + 1] = '"error":' .. error_json
  end
  if status == 'succeeded' and redis.call('STRLEN', K('res', job)) <= INLINE_BYTES then
    parts[#parts + 1] = '"result":' .. redis.call('GET', K('res', job))
  end
  return '{' .. table.concat(parts, ',') .. '}'
end

-- The URL of a registered endpoint, or nil if it is gone or does not want such events.
local function endpoint_url(tenant, id, event)
  local text = redis.call('HGET', K('endpoints', tenant), id)
  local endpoint = text and cjson.decode(text)
  local wanted = endpoint and #endpoint.events == 0
  for _, one in ipairs(endpoint and endpoint.events or {}) do
    wanted = wanted or one == event
  end
  return wanted and endpoint.url or nil
end

-- Each end of a job is an event of its own, also the second of two that look alike: its id counts them.
post_event = function(job, status, now, error_json)
  local j = read(job, 'tenant', 'hook_events', 'webhook', 'attempt', 'created', 'metadata', 'traceparent')
  local event = 'job.' .. status
  if not j.hook_events or (j.hook_events ~= '*' and not string.find(j.hook_events, ',' .. event .. ',', 1, true)) then
    return
  end
  local target = cjson.decode(j.webhook)
  local endpoint = type(target.endpoint_id) == 'string' and target.endpoint_id or ''
  local url = target.url
  if endpoint ~= '' then
    url = endpoint_url(j.tenant, endpoint, event)
  end
  if not url then
    return
  end
  local ordinal = redis.call('HINCRBY', K('job', job), 'events', 1)
  redis.call('SET', K('events', job), ordinal, 'PX', KEEP_MS)
  open_delivery(event_id(job, ordinal), j.tenant, event_data(job, j, status, now, error_json), now,
    'job_id', job, 'event', event, 'url', url, 'endpoint_id', endpoint, 'traceparent', j.traceparent or '')
end
