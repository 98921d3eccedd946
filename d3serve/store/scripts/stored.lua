-- STORED: where the states of groups, or pieces of files, are. ARGV: group or piece ... Answers for each '@...', the
-- reference to its file, or '+' for one that Redis holds, or '' for none.
local answer = {}
for i, group in ipairs(ARGV) do
  local st = K('st', group)
  local first = redis.call('GETRANGE', st, 0, 0)
  if first == '' then
    st = K('piece', group)
    first = redis.call('GETRANGE', st, 0, 0)
  end
  answer[i] = first == '@' and redis.call('GET', st) or (first == '' and '' or '+')
end
return answer
