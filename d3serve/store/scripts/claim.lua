-- CLAIM: take whole state groups under a lease until the turn is full; the first group always fits.
-- Tenants take turns: the next group is always one of the tenant that has been given the fewest tokens.
-- ARGV: lease, worker, pid, lease_ms, max_tokens, max_questions, max_groups, fairness_ms, patience_ms,
--       serves (the model that the worker has told of, '' if nobody need know), revision (that it has loaded, '' if
--       none), beside (the lease of the worker's long turn that this one overtakes, or '': then only what fits is taken,
--       and nothing that may kill it), ahead ('1': the turn waits until the worker's pass ends, so it takes interactive
--       work alone, as beside a long turn, that nobody else could take now), lane ... (that the worker serves)
-- Answers {1, {lane to wake ...}, {group, state, {{id, questions, tenant ...} ...}} ...}, nothing after the lanes when
-- there is no work; or {0} where nobody knows the worker, so that another model may have got the queue.
-- Called again with its own lease, after its answer was lost, it answers the same.
local lease, worker, pid, lease_ms = unpack(ARGV, 1, 4)
local max_tokens, max_questions, max_groups = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local fairness_ms, patience_ms, serves, revision = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], ARGV[11]
local beside, ahead, LANES = ARGV[12] ~= '' and ARGV[12], ARGV[13] == '1', {unpack(ARGV, 14)}
local small = beside or ahead
local MAX_JOBS = 2000
local OFFLINE_TOKENS = 2048 -- of several states in one turn: nine tenths of a long turn's rate, and a short wait
local MAX_LOOKS = 1024 -- at tenants, and at groups: what one claim may cost, however many wait
local SWEEP_MS = 500   -- who leaves a group is asked again by a sweep; a shorter wait would save nothing
local now = now_ms()
local turn, tokens, questions, jobs, alone = {}, 0, 0, 0, false
local left_to_idle = false -- a group whose state an idle worker holds: it should hear of it

local function again()
  local ids, answer = {}, {1, {}}
  for _, id in ipairs(redis.call('SMEMBERS', K('leasejobs', lease))) do
    local group = redis.call('HGET', K('job', id), 'group')
    ids[group] = ids[group] or {}
    table.insert(ids[group], id)
  end
  for group, members in pairs(ids) do
    answer[#answer + 1] = handed(group, members)
  end
  return answer
end

local function is_known()
  return serves == '' or (redis.call('HGET', K('worker', worker), 'serves') == serves
    and tonumber(redis.call('ZSCORE', K('workers'), worker) or 0) > now)
end

-- Who is alive, who of them is in a turn, and who could take work of each lane.
local function census()
  local crew = {live = 0, offline = 0, idle = 0, busy = {}, hands = {interactive = 0, offline = 0}}
  for _, held in ipairs(redis.call('ZRANGE', K('leases'), 0, -1)) do
    local l = redis.call('HMGET', K('lease', held), 'worker', 'lane')
    crew.busy[l[1] or ''] = crew.busy[l[1] or ''] == 'offline' and 'offline' or l[2]
    crew.offline = crew.offline + (l[2] == 'offline' and 1 or 0)
  end
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', K('workers'), int(now), '+inf')) do
    local said = redis.call('HMGET', K('worker', one), 'load', 'lanes')
    local ready = said[1] ~= 'loading' and said[1] ~= 'failed' and crew.busy[one] ~= 'offline'
    crew.live = crew.live + 1
    crew.idle = crew.idle + ((ready and one ~= worker and not crew.busy[one]) and 1 or 0)
    for lane, count in pairs(crew.hands) do
      if ready and (not said[2] or string.find(said[2], lane, 1, true)) then
        crew.hands[lane] = count + 1
      end
    end
  end
  return crew
end

-- An offline turn is long: all workers but one may be in one, so that interactive work finds somebody.
local function offline_allowed(crew)
  return crew.offline < math.max(1, crew.live - 1)
end

-- Groups that an earlier version left on no shelf are the oldest of their lane.
local function adopt(lane, oldest)
  if not redis.call('HGET', K('grp', oldest), 'tenant') then
    for _, group in ipairs(redis.call('ZRANGE', K('ready', lane), 0, MAX_LOOKS - 1)) do
      place(group)
    end
  end
end

-- Interactive work goes first; offline work that has waited for patience_ms is then given as many tokens as that.
local function lanes_in_order(crew)
  local order, waits = {}, {}
  for _, lane in ipairs(LANES) do
    local head = redis.call('ZRANGE', K('ready', lane), 0, 0, 'WITHSCORES')
    if head[1] and (lane ~= 'offline' or offline_allowed(crew)) then
      adopt(lane, head[1])
      order[#order + 1] = lane
      waits[lane] = now - head[2]
    end
  end
  table.sort(order) -- interactive, offline
  local contended = waits.interactive and waits.offline and waits.offline > patience_ms
  if beside then
    return order, false
  elseif not contended then
    redis.call('HDEL', K('pace'), 'beside', 'overdue')
  else
    local given = redis.call('HMGET', K('pace'), 'beside', 'overdue')
    if tonumber(given[2] or 0) <= tonumber(given[1] or 0) then
      order = {'offline', 'interactive'}
    end
  end
  return order, contended
end

local function before(a, b)
  return a.tag < b.tag or (a.tag == b.tag and a.place < b.place)
end

-- The tenants that wait in a lane, the one that has been given the least first. One that does nothing any more is
-- forgotten when it comes to the front: what it was given then counts for nothing.
local function tenants_in(lane, shelves)
  local list, at = {}, pace(lane)
  for _, on in ipairs(shelves) do
    local rows, front = redis.call('ZRANGE', K('ring', on), 0, MAX_LOOKS - 1, 'WITHSCORES'), true
    for i = 1, #rows, 2 do
      local tenant, tag = rows[i], tonumber(rows[i + 1])
      if redis.call('ZCARD', K('share', on .. ':' .. tenant)) > 0 then
        list[#list + 1] = {on = on, tenant = tenant, tag = math.max(tag, at), place = #list}
        front = false
        if #list >= max_groups then
          break
        end
      elseif front then
        redis.call('ZREM', K('ring', on), tenant)
        at = math.max(at, tag)
      end
    end
  end
  table.sort(list, before)
  set_pace(lane, list[1] and list[1].tag or at)
  return list
end

-- A cold worker leaves an expensive state to the one that holds it for as long as reading it again would take.
local function left_to_holder(group)
  local speed = tonumber(redis.call('HGET', K('worker', worker), 'read_tokens_per_s') or 0)
  local cost_ms = speed > 0 and redis.call('HGET', K('grp', group), 'state_tokens') * 1000 / speed or 0
  if cost_ms < SWEEP_MS then
    return false
  end
  local first = redis.call('ZRANGE', K('pend', group), 0, 0)[1]
  return now - redis.call('HGET', K('job', first), 'created') < math.min(cost_ms, fairness_ms)
end

-- A tenant's groups: overdue first, then those whose state this worker holds, then cold ones. Those held by another
-- that is alive come last of all, and not before that one had its time.
local function candidates(one, page, crew)
  local rows = redis.call('ZRANGE', K('share', one.on .. ':' .. one.tenant), 0, page - 1, 'WITHSCORES')
  local warm, list = {}, {}
  for i = 1, #rows, 2 do
    warm[#warm + 1] = K('warm', rows[i])
  end
  local holders = #warm > 0 and redis.call('MGET', unpack(warm)) or {}
  for i = 1, #rows, 2 do
    local group, holder, waited, class = rows[i], holders[(i + 1) / 2], now - rows[i + 1], 2
    if waited > fairness_ms then
      class = 0
    elseif holder == worker then
      class = 1
    elseif holder and redis.call('EXISTS', K('worker', holder)) == 1 then
      class = left_to_holder(group) and 4 or 3
      left_to_idle = left_to_idle or (class == 4 and not crew.busy[holder])
    end
    if class < 4 then
      list[#list + 1] = {group = group, class = class, place = i}
    end
  end
  table.sort(list, function(a, b)
    return a.class < b.class or (a.class == b.class and a.place < b.place)
  end)
  return list
end

local function fits(j, cost)
  return (jobs == 0 and not small)
    or (tokens + cost <= max_tokens and questions + j.questions <= max_questions and jobs < MAX_JOBS)
end

-- Answers the ids taken from one group. A job that was lost with a worker before may have killed it:
-- it runs alone, so it is left where it is unless the turn is still empty.
local function claim_group(group)
  local taken = {}
  local state_tokens = tonumber(redis.call('HGET', K('grp', group), 'state_tokens'))
  for _, id in ipairs(redis.call('ZRANGE', K('pend', group), 0, MAX_JOBS - 1)) do
    local j = read(id, 'tokens', 'questions', 'losses', 'deadline', 'beside')
    local cost = j.tokens + (#taken == 0 and state_tokens or 0)
    local suspect = tonumber(j.losses) > 0 or (beside and j.beside == 'no')
    if tonumber(j.deadline) > 0 and now >= tonumber(j.deadline) then
      expire(id, 'queued', now)
    elseif not fits(j, cost) then
      break
    elseif not suspect or (jobs == 0 and not small) then
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

-- Takes a group of a tenant, and answers whether it had jobs for this turn.
local function take_group(lane, one, group)
  local owned = redis.call('EXISTS', K('own', group)) == 1 -- an earlier version took it and knew no shelves
  local taken = owned and {} or claim_group(group)
  if #taken > 0 then
    redis.call('SET', K('own', group), lease)
    redis.call('SADD', K('leasegrps', lease), group)
    turn[#turn + 1] = handed(group, taken)
  end
  if owned or #taken > 0 then
    withdraw(lane, one.on, one.tenant, group)
  else
    place(group)
  end
  return #taken > 0
end

-- Fills the turn from one lane, at most with a worker's share of what waits: others may be idle, and groups once taken
-- keep what joins them.
local function fill(lane, crew)
  local shelves = revision == '' and {lane} or {lane, shelf(lane, revision)}
  local line = tenants_in(lane, shelves)
  local most = math.ceil(redis.call('ZCARD', K('ready', lane)) / math.max(1, crew.hands[lane]))
  most = math.min(max_groups, most)
  local page, looks, later = math.max(8, math.ceil(max_groups / math.max(1, #line))), 0, {}
  while #turn < most and looks < MAX_LOOKS and not alone do
    local one = table.remove(line, 1)
    if not one and #later == 0 then
      break
    elseif not one then
      line, later = later, {}
    else
      one.groups = one.groups or candidates(one, page, crew)
      local best = one.groups[1]
      if best and best.class == 3 and not one.late then
        one.late = true
        later[#later + 1] = one
      elseif best then
        looks = looks + 1
        table.remove(one.groups, 1)
        local spent = tokens
        if take_group(lane, one, best.group) then
          one.tag = one.tag + tokens - spent
          charge(shelves, one.tenant, one.tag)
          max_tokens = lane == 'offline' and math.min(max_tokens, OFFLINE_TOKENS) or max_tokens
        end
        local at = 1
        while line[at] and before(line[at], one) do
          at = at + 1
        end
        table.insert(line, at, one)
      end
    end
  end
end

write_when_full()
if not is_known() then
  return {0}
end
local hops = 1
for _, lane in ipairs(small and {} or LANES) do -- for these nobody has come for a wake-up
  hops = math.max(hops, tonumber(redis.call('GET', K('wake', lane)) or 1))
  redis.call('DEL', K('wake', lane))
  redis.call('ZREM', K('idle', lane), worker)
end
redis.call('DEL', K('call', worker))
if redis.call('EXISTS', K('lease', lease)) == 1 then
  return again()
end
local crew = census()
local order, contended = lanes_in_order(crew)
if ahead and (crew.idle > 0 or order[1] ~= 'interactive') then
  order = {}
end
for _, lane in ipairs(ahead and {order[1]} or order) do
  fill(lane, crew)
  if #turn > 0 then
    redis.call('HSET', K('lease', lease), 'worker', worker, 'pid', pid, 'lane', lane, 'ms', lease_ms)
    redis.call('ZADD', K('leases'), int(now + lease_ms), lease)
    tally('attempts:begun', jobs)
    if ahead then
      redis.call('HSET', K('lease', lease), 'waits', '1')
    end
    if beside and redis.call('EXISTS', K('lease', beside)) == 1 then
      redis.call('HSET', K('lease', beside), 'waits', '1')
    end
    if contended then
      redis.call('HINCRBY', K('pace'), lane == 'offline' and 'overdue' or 'beside', int(tokens))
    end
    break
  end
end
-- Who found nothing wakes nobody: what waits is not for now, and two idle workers would wake each other for ever.
-- What waits for an idle worker is told on, from one to the next, until each may have heard of it.
local wakes = {}
for _, lane in ipairs(LANES) do
  if #turn > 0 and wants_wake(lane) then
    wakes[#wakes + 1] = lane
  elseif #turn == 0 and not small and left_to_idle and hops <= crew.live and wants_wake(lane, hops + 1) then
    wakes[#wakes + 1] = lane
  end
end
return {1, wakes, unpack(turn)}
