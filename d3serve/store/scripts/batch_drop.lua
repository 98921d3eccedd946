-- BATCH_DROP: take out a batch, whatever its status, with the output that it has by now. ARGV: id, tenant, piece ...
-- A feeder that is at it finds its fence gone. Answers 1, or 0 where there is none.
local id, tenant = unpack(ARGV, 1, 2)
write_when_full()
local input, ended, kept = unpack(redis.call('HMGET', K('batch', id), 'input', 'ended', 'kept'))
redis.call('ZREM', K('batches', tenant), id)
redis.call('ZREM', K('feed', tenant), id)
if not input then
  return 0
end
let_go(id, tenant, kept or 0)
redis.call('DEL', K('batch', id), K('flight', id), K('labels', id))
if not ended and redis.call('EXISTS', K('file', input)) == 1 then
  redis.call('HINCRBY', K('file', input), 'used', -1)
end
for i = 3, #ARGV do
  drop_piece(ARGV[i], tenant)
end
return 1
