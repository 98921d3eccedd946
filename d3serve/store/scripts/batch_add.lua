-- BATCH_ADD: make a batch of a file, to be looked at now. ARGV: id, tenant, file, window_ms, margin_ms (that the file is
-- kept for beyond it), most (open of a tenant), max_bytes (that the tenant may keep with it), then field, value ...
-- Answers {'new'}, {'unknown'} (the file), {'purpose', which}, {'short', expires of the file}, {'full', open} or
-- {'quota', used}.
local id, tenant, file, window, margin, most, max_bytes = unpack(ARGV, 1, 7)
local FIELDS = 8
local owner, purpose, expires = unpack(redis.call('HMGET', K('file', file), 'tenant', 'purpose', 'expires'))
local now, open = now_ms(), redis.call('ZCARD', K('feed', tenant))
local kept, bytes = tonumber(redis.call('HGET', K('kept'), tenant) or 0), RECORD_BYTES
for i = FIELDS, #ARGV do
  bytes = bytes + #ARGV[i]
end
if redis.call('EXISTS', K('batch', id)) == 1 then
  return {'new'} -- the same call again, after its answer was lost
elseif owner ~= tenant then
  return {'unknown'}
elseif purpose ~= 'batch' then
  return {'purpose', purpose}
elseif tonumber(expires) < now + window + margin then
  return {'short', tonumber(expires)}
elseif open >= tonumber(most) then
  return {'full', open}
elseif kept + bytes > tonumber(max_bytes) then
  return {'quota', kept}
end
redis.call('HSET', K('batch', id), 'tenant', tenant, 'input', file, 'status', 'validating', 'created', int(now),
  'expires', int(now + window), 'fence', 0, unpack(ARGV, FIELDS))
hold_batch(id, tenant, bytes, FOREVER)
redis.call('ZADD', K('batches', tenant), string.format('%.3f', now_fine()), id)
redis.call('HINCRBY', K('file', file), 'used', 1)
feed_at(tenant, id, now)
return {'new'}
