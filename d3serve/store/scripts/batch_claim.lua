-- BATCH_CLAIM: take the batch that is due, for a while; tenants take turns, and of a tenant its batches.
-- ARGV: lease_ms. Answers {id, fence}, or {} where none is due.
local now = now_ms()
write_when_full()
local tenant = redis.call('ZRANGEBYSCORE', K('feeds'), '-inf', int(now), 'LIMIT', 0, 1)[1]
if not tenant then
  return {}
end
local feed = K('feed', tenant)
local id = redis.call('ZRANGEBYSCORE', feed, '-inf', int(now), 'LIMIT', 0, 1)[1]
if id and redis.call('EXISTS', K('batch', id)) == 0 then -- whatever took it away
  redis.call('ZREM', feed, id)
  id = nil
elseif id then
  redis.call('ZADD', feed, int(now + ARGV[1]), id)
end
local head = redis.call('ZRANGE', feed, 0, 0, 'WITHSCORES')
if head[1] then
  redis.call('ZADD', K('feeds'), int(math.max(now, head[2])), tenant)
else
  redis.call('ZREM', K('feeds'), tenant)
end
if not id then
  return {}
end
return {id, redis.call('HINCRBY', K('batch', id), 'fence', 1)}
