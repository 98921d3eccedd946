-- CLAIM: take whole state groups under a lease until the turn is full; the first group always fits.
-- ARGV: lease, worker, pid, lease_ms, max_tokens, max_questions, max_groups, fairness_ms, patience_ms,
--       lane ... (those that the worker serves)
-- Answers {lanes to wake, {group, {id ...}} ...}; nothing after the lanes when there is no work.
-- Called again with its own lease, after its answer was lost, it answers the same.
local lease, worker, pid, lease_ms = unpack(ARGV, 1, 4)
local max_tokens, max_questions, max_groups = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local fairness_ms, patience_ms = tonumber(ARGV[8]), tonumber(ARGV[9])
local WINDOW, MAX_JOBS = 64, 2000
local now = now_ms()
local turn, tokens, questions, jobs, alone = {}, 0, 0, 0, false

local function again()
  local ids, answer = {}, {{}}
  for _, id in ipairs(redis.call('SMEMBERS', K('leasejobs', lease))) do
    local group = redis.call('HGET', K('job', id), 'group')
    ids[group] = ids[group] or {}
    table.insert(ids[group], id)
  end
  for group, members in pairs(ids) do
    answer[#answer + 1] = {group, members}
  end
  return answer
end

-- An offline turn is long: all workers but one may be in one, so that interactive work finds somebody.
local function offline_allowed()
  local busy = 0
  for _, held in ipairs(redis.call('ZRANGE', K('leases'), 0, -1)) do
    if redis.call('HGET', K('lease', held), 'lane') == 'offline' then
      busy = busy + 1
    end
  end
  local live = redis.call('ZCOUNT', K('workers'), int(now), '+inf')
  return busy < math.max(1, live - 1)
end

-- The lane whose first group has waited longest; offline work counts as younger by patience_ms.
local function lanes_by_need()
  local order = {}
  for i = 10, #ARGV do
    local lane = ARGV[i]
    local head = redis.call('ZRANGE', K('ready', lane), 0, 0, 'WITHSCORES')
    if head[1] and (lane ~= 'offline' or offline_allowed()) then
      order[#order + 1] = {lane = lane, rank = head[2] + (lane == 'offline' and patience_ms or 0)}
    end
  end
  table.sort(order, function(a, b) return a.rank < b.rank end)
  return order
end

-- Overdue groups first, then those whose state this worker holds, then cold ones, then those held elsewhere.
-- Only the first WINDOW groups are looked at for warmth.
local function candidates(lane)
  local rows = redis.call('ZRANGE', K('ready', lane), 0, math.max(WINDOW, max_groups) - 1, 'WITHSCORES')
  local list = {}
  for i = 1, #rows, 2 do
    local holder = i < 2 * WINDOW and redis.call('GET', K('warm', rows[i]))
    local class = 2
    if now - rows[i + 1] > fairness_ms then
      class = 0
    elseif holder == worker then
      class = 1
    elseif holder and redis.call('EXISTS', K('worker', holder)) == 1 then
      class = 3
    end
    list[#list + 1] = {group = rows[i], class = class, place = i}
  end
  table.sort(list, function(a, b)
    return a.class < b.class or (a.class == b.class and a.place < b.place)
  end)
  return list
end

local function fits(j, cost)
  return jobs == 0
    or (tokens + cost <= max_tokens and questions + j.questions <= max_questions and jobs < MAX_JOBS)
end

-- Answers the ids taken from one group. A job that was lost with a worker before may have killed it:
-- it runs alone, so it is left where it is unless the turn is still empty.
local function claim_group(group)
  local taken = {}
  local state_tokens = tonumber(redis.call('HGET', K('grp', group), 'state_tokens'))
  for _, id in ipairs(redis.call('ZRANGE', K('pend', group), 0, MAX_JOBS - 1)) do
    local j = read(id, 'tokens', 'questions', 'losses', 'deadline')
    local cost = j.tokens + (#taken == 0 and state_tokens or 0)
    local suspect = tonumber(j.losses) > 0
    if tonumber(j.deadline) > 0 and now >= tonumber(j.deadline) then
      expire(id, 'queued', now)
    elseif not fits(j, cost) then
      break
    elseif not suspect or jobs == 0 then
      take(id, lease, worker, now)
      taken[#taken + 1] = id
      tokens, questions, jobs = tokens + cost, questions + j.questions, jobs + 1
      alone = suspect
      if alone then
        break
      end
    end
  end
  return taken
end

drain()
for i = 10, #ARGV do
  redis.call('DEL', K('wake', ARGV[i]))
end
if redis.call('EXISTS', K('lease', lease)) == 1 then
  return again()
end
for _, choice in ipairs(lanes_by_need()) do
  for _, candidate in ipairs(candidates(choice.lane)) do
    if alone or #turn >= (choice.lane == 'offline' and 1 or max_groups) then
      break
    end
    local taken = claim_group(candidate.group)
    if #taken > 0 then
      redis.call('SET', K('own', candidate.group), lease)
      redis.call('SADD', K('leasegrps', lease), candidate.group)
      redis.call('ZREM', K('ready', choice.lane), candidate.group)
      turn[#turn + 1] = {candidate.group, taken}
    else
      place(candidate.group)
    end
  end
  if #turn > 0 then
    redis.call('HSET', K('lease', lease), 'worker', worker, 'pid', pid, 'lane', choice.lane)
    redis.call('ZADD', K('leases'), int(now + lease_ms), lease)
    break
  end
end
-- Who found nothing wakes nobody: what waits is not for now, and two idle workers would wake each other for ever.
local wakes = {}
for i = 10, #ARGV do
  if #turn > 0 and wants_wake(ARGV[i]) then
    wakes[#wakes + 1] = ARGV[i]
  end
end
return {wakes, unpack(turn)}
