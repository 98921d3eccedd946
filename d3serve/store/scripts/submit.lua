-- SUBMIT: write a job, its place in its group and its idempotency record; twice with one id is once.
-- ARGV: id, group, lane, tenant, state, state_bytes, questions, rank_offset_ms, expires_ms (0: never),
--       idem ('' none), fingerprint, idem_ttl_ms, max_jobs, max_bytes (that may wait), max_tenant_jobs (that may wait),
--       max_tenant_bytes (that may be kept), then field, value ... of the job.
-- `state` is '=text' or JSON, or '@...', a reference to the file that holds it, or '': look, it may be here already.
-- Answers {'new', id, wake 0/1, lane, file, created} or {'old', id, 0, lane, file}, where `file` is the reference
-- that the group has ('' none); or {'state'}: send it; or {'reused'}, or {'full', jobs}, or {'quota', 'jobs'|'bytes', used}.
-- The first write may fail for want of memory; nothing is half written then.
local id, group, lane, tenant, state, state_bytes, questions = unpack(ARGV, 1, 7)
local offset, expires, idem, print, idem_ttl, max_jobs, max_bytes = unpack(ARGV, 8, 14)
local max_tenant_jobs, max_tenant_bytes = tonumber(ARGV[15]), tonumber(ARGV[16])
local FIELDS = 17

local function file()
  local st = K('st', group)
  return redis.call('GETRANGE', st, 0, 0) == '@' and redis.call('GET', st) or ''
end

if idem ~= '' then
  local seen = redis.call('GET', K('idem', idem))
  if seen then
    local first, fingerprint = string.match(seen, '^(%S+) (.*)$')
    if first ~= id and fingerprint ~= print then
      return {'reused'}
    elseif first ~= id and redis.call('EXISTS', K('job', first)) == 1 then
      return {'old', first, 0, lane, file()} -- else it is gone, and whoever asks again wants an answer
    end
  end
end
if redis.call('EXISTS', K('job', id)) == 1 then
  return {'new', id, 1, lane, file()} -- the same call again, after its answer was lost
end

local size = state_bytes + #questions
local jobs, bytes, waiting = 0, 0, 0
for _, name in ipairs({'interactive', 'offline'}) do
  jobs = jobs + redis.call('ZCARD', K('queued', name))
  waiting = waiting + redis.call('ZCARD', K('line', name .. ':' .. tenant))
  bytes = bytes + (redis.call('HGET', K('load', name), 'bytes') or 0)
end
if jobs >= tonumber(max_jobs) or bytes + size > tonumber(max_bytes) then
  return {'full', jobs}
end
local stored = redis.call('EXISTS', K('st', group)) == 1
local record = RECORD_BYTES
for i = FIELDS, #ARGV do
  record = record + #ARGV[i]
end
if waiting >= max_tenant_jobs then
  return {'quota', 'jobs', waiting}
end
local kept = redis.call('HGET', K('kept'), tenant) or 0
if kept + record + #questions + (stored and 0 or state_bytes) > max_tenant_bytes then
  return {'quota', 'bytes', tonumber(kept)}
end
if state == '' and not stored then
  return {'state'}
end

local fine = now_fine()
local now = math.floor(fine)
local job = K('job', id)
local deadline = tonumber(expires) > 0 and now + expires or 0
redis.call('HSET', job, 'status', 'queued', 'stage', 'queued', 'group', group, 'lane', lane,
  'tenant', tenant, 'created', int(now), 'rank', string.format('%.3f', fine + offset), 'deadline', int(deadline),
  'bytes', int(size), 'attempt', 0, 'losses', 0, 'questions_done', 0,
  'record', int(record), 'idem', idem, unpack(ARGV, FIELDS))
hold_job(id, tenant, record + #questions, FOREVER)
redis.call('SET', K('body', id), questions)
if state ~= '' then
  redis.call('SET', K('st', group), state, 'NX')
end
hold(group, tenant, state_bytes_of(group), FOREVER)
redis.call('PERSIST', K('st', group))
redis.call('PERSIST', K('need', group))
redis.call('ZADD', K('need', group), int(FOREVER), id)
if idem ~= '' then
  redis.call('SET', K('idem', idem), id .. ' ' .. print, 'PX', idem_ttl)
end

-- REAP takes out those that go. Those that an earlier version left go some for each that comes; the oldest will not
-- do: a few that are kept for long hide all others.
redis.call('ZADD', K('jobs', tenant), string.format('%.3f', fine), id)
for _, old in ipairs(redis.call('ZRANDMEMBER', K('jobs', tenant), 4)) do
  if redis.call('EXISTS', K('job', old)) == 0 then
    redis.call('ZREM', K('jobs', tenant), old)
  end
end

enqueue(id)
place(group)
local group_lane = redis.call('HGET', K('grp', group), 'lane')
return {'new', id, wants_wake(group_lane) and 1 or 0, group_lane, file(), int(now)}
