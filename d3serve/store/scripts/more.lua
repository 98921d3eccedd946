-- MORE: late joiners of the groups that a lease owns, while their states are still at hand.
-- ARGV: lease, max_tokens, max_questions. Answers {{group, state, {{id, questions, tenant ...} ...}} ...}.
local lease, max_tokens, max_questions = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local LOOKS = 16
local now, answer, tokens, questions = now_ms(), {}, 0, 0

-- Whether a tenant waits that has been given less: its turn is next, so nobody else's is made longer.
local function another_first(lane, tenant)
  local at, tag = pace(lane), tonumber(redis.call('ZSCORE', K('ring', lane), tenant) or FOREVER)
  local rows = redis.call('ZRANGE', K('ring', lane), 0, LOOKS - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local other = rows[i]
    if other ~= tenant and math.max(tonumber(rows[i + 1]), at) < tag
      and redis.call('ZCARD', K('share', lane .. ':' .. other)) > 0 then
      return true
    end
  end
  return false
end

local function join(group)
  local taken = {}
  for _, id in ipairs(redis.call('ZRANGE', K('pend', group), 0, 999)) do
    local j = read(id, 'tokens', 'questions', 'losses')
    if tonumber(j.losses) == 0 then
      if tokens > 0 and (tokens + j.tokens > max_tokens or questions + j.questions > max_questions) then
        break
      end
      take(id, lease, redis.call('HGET', K('lease', lease), 'worker'), now)
      taken[#taken + 1] = id
      tokens, questions = tokens + j.tokens, questions + j.questions
    end
  end
  return taken
end

write_when_full()
if redis.call('EXISTS', K('lease', lease)) == 0 then
  return answer
end
for _, group in ipairs(redis.call('SMEMBERS', K('leasegrps', lease))) do
  local lane, tenant, on = place_of(group)
  if lane and not another_first(lane, tenant) then
    local spent = tokens
    local taken = join(group)
    if #taken > 0 then
      answer[#answer + 1] = handed(group, taken)
      tally('attempts:begun', #taken)
      local tag = tonumber(redis.call('ZSCORE', K('ring', on), tenant) or pace(lane))
      charge({lane, on}, tenant, tag + tokens - spent)
    end
  end
end
return answer
