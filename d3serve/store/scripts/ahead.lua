-- AHEAD: what of a waiting job's own tenant comes before it. ARGV: id.
-- Answers {lane, tenant, jobs, tokens}, or {} when it does not wait. Groups are claimed whole, so what counts is how
-- many groups of the tenant come first, each taken for as large as they are on average.
local id = ARGV[1]
local j = read(id, 'status', 'group')
if j.status ~= 'queued' then
  return {}
end
local lane, tenant, on = place_of(j.group)
if not lane then
  return {}
end
local share, jobs = K('share', on .. ':' .. tenant), redis.call('ZCARD', K('line', lane .. ':' .. tenant))
local first = redis.call('ZRANK', share, j.group)
local before = first and math.floor(jobs * first / redis.call('ZCARD', share)) or 0
before = before + (redis.call('ZRANK', K('pend', j.group), id) or 0)
local tokens = redis.call('HGET', K('waiting', lane), tenant) or 0
return {lane, tenant, before, math.floor(tokens * before / math.max(jobs, 1))}
