-- SUBMIT: write a job, its place in its group and its idempotency record; twice with one id is once.
-- ARGV: id, group, lane, tenant, state, state_bytes, questions, rank_offset_ms, expires_ms (0: never),
--       idem ('' none), fingerprint, idem_ttl_ms, max_jobs, max_bytes, then field, value ... of the job.
-- `state` is '=text' or JSON, or '@...', a reference to the file that holds it, or '': look, it may be here already.
-- Answers {'new', id, wake 0/1, lane, file, created} or {'old', id, 0, lane, file}, where `file` is the reference
-- that the group has ('' none); or {'state'}: send it; or {'reused'} or {'full', jobs, bytes}.
-- The first write may fail for want of memory; nothing is half written then.
local id, group, lane, tenant, state, state_bytes, questions = unpack(ARGV, 1, 7)
local offset, expires, idem, print, idem_ttl, max_jobs, max_bytes = unpack(ARGV, 8, 14)

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
local jobs, bytes = 0, 0
for _, name in ipairs({'interactive', 'offline'}) do
  jobs = jobs + redis.call('ZCARD', K('queued', name))
  bytes = bytes + (redis.call('HGET', K('load', name), 'bytes') or 0)
end
if jobs >= tonumber(max_jobs) or bytes + size > tonumber(max_bytes) then
  return {'full', jobs, int(bytes)}
end
if state == '' and redis.call('EXISTS', K('st', group)) == 0 then
  return {'state'}
end

local fine = now_fine()
local now = math.floor(fine)
local job = K('job', id)
local deadline = tonumber(expires) > 0 and now + expires or 0
redis.call('HSET', job, 'status', 'queued', 'stage', 'queued', 'group', group, 'lane', lane,
  'tenant', tenant, 'created', int(now), 'rank', string.format('%.3f', fine + offset), 'deadline', int(deadline),
  'bytes', int(size), 'attempt', 0, 'losses', 0, 'questions_done', 0, unpack(ARGV, 15))
redis.call('SET', K('body', id), questions)
if state ~= '' then
  redis.call('SET', K('st', group), state, 'NX')
end
redis.call('PERSIST', K('st', group))
redis.call('PERSIST', K('need', group))
redis.call('ZADD', K('need', group), int(FOREVER), id)
if idem ~= '' then
  redis.call('SET', K('idem', idem), id .. ' ' .. print, 'PX', idem_ttl)
end

-- Some that are gone leave for each that comes. The oldest will not do: a few that are kept for long hide all others.
redis.call('ZADD', K('jobs', tenant), int(now), id)
for _, old in ipairs(redis.call('ZRANDMEMBER', K('jobs', tenant), 4)) do
  if redis.call('EXISTS', K('job', old)) == 0 then
    redis.call('ZREM', K('jobs', tenant), old)
  end
end

enqueue(id)
place(group)
local group_lane = redis.call('HGET', K('grp', group), 'lane')
return {'new', id, wants_wake(group_lane) and 1 or 0, group_lane, file(), int(now)}
