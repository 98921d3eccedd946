-- HOOK_CLAIM: take due deliveries for a while; one that is not settled by then is due again.
-- ARGV: now many, lease_ms. Answers the members.
local now = now_ms()
local due = redis.call('ZRANGEBYSCORE', K('hooks_due'), '-inf', int(now), 'LIMIT', 0, tonumber(ARGV[1]))
for _, member in ipairs(due) do
  redis.call('ZADD', K('hooks_due'), int(now + ARGV[2]), member)
end
return due
