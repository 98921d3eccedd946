-- HOOK_SETTLE: note what became of a try, or make a delivery due again.
-- ARGV: id, the state that it was found in, the new one, due_ms ('' never), then field, value ...
-- Answers 1; 0 when it is no longer in that state (erased, settled by another), or is to be sent and has no text.
local id, was, state, due = unpack(ARGV, 1, 4)
local row = K('delivery', id)
write_when_full()
if redis.call('HGET', row, 'state') ~= was or (state == 'pending' and redis.call('EXISTS', K('told', id)) == 0) then
  return 0
end
redis.call('HSET', row, unpack(ARGV, 5))
if state ~= 'pending' then
  close_delivery(id, state)
  return 1
end
redis.call('HSET', row, 'state', state, 'due', due)
local tenant = redis.call('HGET', row, 'tenant')
due_at(tenant, id, due)
if was ~= 'pending' then
  redis.call('PERSIST', row)
  redis.call('PEXPIRE', K('told', id), KEEP_MS)
  count_open(tenant, id, redis.call('STRLEN', K('told', id)))
end
return 1
