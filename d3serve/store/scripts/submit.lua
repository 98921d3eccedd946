-- SUBMIT: write a job, its place in its group and its idempotency record; twice with one id is once.
-- ARGV: id, group, lane, tenant, state, state_bytes, questions, rank_offset_ms, expires_ms (0: never),
--       idem ('' none), fingerprint, idem_ttl_ms, max_jobs, max_bytes (that may wait), max_tenant_jobs (that may wait),
--       max_tenant_bytes (that may be kept), then field, value ... of the job.
-- `state` is '=text' or JSON, or '@...', a reference to the file that holds it, or '': look, it may be here already.
-- Answers {'new', id, wake 0/1, lane, file, created} or {'old', id, 0, lane, file}, where `file` is the reference
-- that the group has ('' none); or {'state'}: send it; or {'reused', id, fingerprint}, both
-- of the first; or {'full', jobs}, or {'quota', 'jobs'|'bytes', used}.
-- The first write may fail for want of memory; nothing is half written then.
local id, group, lane, tenant, state, state_bytes, questions = unpack(ARGV, 1, 7)
local offset, expires, idem, print, idem_ttl, max_jobs, max_bytes = unpack(ARGV, 8, 14)
local max_tenant_jobs, max_tenant_bytes = tonumber(ARGV[15]), tonumber(ARGV[16])
local FIELDS = 17

-- The file of a state that is there already.
local function file()
  local st = K('st', group)
  return redis.call('GETRANGE', st, 0, 0) == '@' and redis.call('GET', st) or ''
end

if idem ~= '' then
  local seen = redis.call('GET', K('idem', idem))
  if seen then
    local first, fingerprint = string.match(seen, '^(%S+) (.*)$')
    if first ~= id and fingerprint ~= print then
      return {'reused', first, fingerprint}
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
local job, record = {}, RECORD_BYTES
for i = FIELDS, #ARGV, 2 do
  job[ARGV[i]] = ARGV[i + 1]
  record = record + #ARGV[i] + #ARGV[i + 1]
end
if waiting >= max_tenant_jobs then
  return {'quota', 'jobs', waiting}
end
local kept, own = redis.call('HGET', K('kept'), tenant) or 0, record + #questions
if kept + own + (stored and 0 or state_bytes) > max_tenant_bytes then
  return {'quota', 'bytes', tonumber(kept)}
end
if state == '' and not stored then
  return {'state'}
end

local fine = now_fine()
local age, now, forever = string.format('%.3f', fine), int(math.floor(fine)), int(FOREVER)
job.group, job.lane, job.tenant, job.bytes = group, lane, tenant, int(size)
job.rank = offset == '0' and age or string.format('%.3f', fine + offset)
job.deadline = tonumber(expires) > 0 and int(math.floor(fine) + expires) or '0'
redis.call('HSET', K('job', id), 'status', 'queued', 'stage', 'queued', 'group', group, 'lane', lane,
  'tenant', tenant, 'created', now, 'rank', job.rank, 'deadline', job.deadline,
  'bytes', job.bytes, 'attempt', '0', 'losses', '0', 'questions_done', '0',
  'record', int(record), 'kept', int(own), unpack(ARGV, FIELDS))
redis.call('SET', K('body', id), questions)
if stored then
  redis.call('PERSIST', K('st', group))
else
  redis.call('SET', K('st', group), state)
end
redis.call('PERSIST', K('need', group))
redis.call('ZADD', K('need', group), forever, id)
-- The entry of a new job is new; that of a state is if there are two.
local entries = redis.call('ZADD', K('holds'), forever, entry(id, tenant, own), forever, entry(group, tenant, state_bytes))
redis.call('HINCRBY', K('kept'), tenant, int(own + (entries == 2 and state_bytes or 0)))
if idem ~= '' then
  redis.call('HSET', K('job', id), 'idem', idem)
  redis.call('SET', K('idem', idem), id .. ' ' .. print, 'PX', idem_ttl)
end

-- REAP takes out those that go. Those that an earlier version left go two for each that comes; the oldest will not
-- do: a few that are kept for long hide all others.
redis.call('ZADD', K('jobs', tenant), age, id)
for _, old in ipairs(redis.call('ZRANDMEMBER', K('jobs', tenant), 2)) do
  if old ~= id and redis.call('EXISTS', K('job', old)) == 0 then
    redis.call('ZREM', K('jobs', tenant), old)
  end
end

local group_lane = enqueue(id, job)
place_on(group, group_lane, tenant, shelf(group_lane, job.revision))
if not stored then
  state = string.sub(state, 1, 1) == '@' and state or ''
end
return {'new', id, wants_wake(group_lane, '1', group) and 1 or 0, group_lane, stored and file() or state, tonumber(now)}
