-- MORE: late joiners of the groups that a lease owns, while their states are still at hand.
-- ARGV: lease, max_tokens, max_questions. Answers {{group, {id ...}} ...}.
local lease, max_tokens, max_questions = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, answer, tokens, questions = now_ms(), {}, 0, 0
drain()
local worker = redis.call('HGET', K('lease', lease), 'worker')
if not worker then
  return answer
end
for _, group in ipairs(redis.call('SMEMBERS', K('leasegrps', lease))) do
  local taken = {}
  for _, id in ipairs(redis.call('ZRANGE', K('pend', group), 0, 999)) do
    local j = read(id, 'tokens', 'questions', 'losses')
    if tonumber(j.losses) == 0 then
      if tokens > 0 and (tokens + j.tokens > max_tokens or questions + j.questions > max_questions) then
        break
      end
      take(id, lease, worker, now)
      taken[#taken + 1] = id
      tokens, questions = tokens + j.tokens, questions + j.questions
    end
  end
  if #taken > 0 then
    answer[#answer + 1] = {group, taken}
  end
end
return answer
