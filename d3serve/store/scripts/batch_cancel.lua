-- BATCH_CANCEL: ask for the end of a batch that has none. ARGV: id, tenant. Answers 1, 0 where it is over already,
-- -1 where there is none.
local id, tenant = unpack(ARGV)
local owner, status, ended = unpack(redis.call('HMGET', K('batch', id), 'tenant', 'status', 'ended'))
if owner ~= tenant then
  return -1
elseif ended then
  return 0
elseif status ~= 'cancelling' then
  redis.call('HSET', K('batch', id), 'status', 'cancelling', 'cancelling_at', int(now_ms()))
  feed_at(tenant, id, now_ms())
end
return 1
