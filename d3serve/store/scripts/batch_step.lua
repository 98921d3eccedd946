-- BATCH_STEP: all that a feeder has achieved at a batch, in one step; nothing of it unless the fence still holds.
-- ARGV: id, fence, step (a name of its own), delay_ms (until it is looked at again), then of each of these how many, and they:
--   fields: field, value; sums: field, by how much; lines that are jobs now: line, job and bytes, label;
--   lines that are none any more: line; texts: 'output' or 'error', piece, its number, text;
--   files, at the end alone: 'output' or 'error', id, ttl_ms, name, how many pieces, piece ...
-- With a field `ended` the batch is over. Answers 1, also to the same step again, whose answer was lost; or 0 where
-- another feeder has the batch.
local id, fence, step, delay = unpack(ARGV, 1, 4)
local row, at = K('batch', id), 4
local function next_one()
  at = at + 1
  return ARGV[at]
end
local function each(width, act)
  for _ = 1, tonumber(next_one()) do
    local values = {}
    for i = 1, width do
      values[i] = next_one()
    end
    act(unpack(values))
  end
end

write_when_full()
local tenant, held, status, input, last = unpack(redis.call('HMGET', row, 'tenant', 'fence', 'status', 'input', 'step'))
if last == step then
  return 1
elseif held ~= fence then
  return 0
end
local now, fields = now_ms(), {step = step}
each(2, function(field, value)
  fields[field] = value
end)
if status == 'cancelling' and not fields.ended then -- since the feeder looked, maybe
  fields.status = status
end
for field, value in pairs(fields) do
  redis.call('HSET', row, field, value)
end
each(2, function(field, more)
  redis.call('HINCRBY', row, field, more)
end)
each(3, function(line, job, label)
  redis.call('HSET', K('flight', id), line, job)
  redis.call('HSET', K('labels', id), line, label)
end)
each(1, function(line)
  redis.call('HDEL', K('flight', id), line)
  redis.call('HDEL', K('labels', id), line)
end)
each(4, function(kind, piece, number, text)
  local size = append_piece(piece, tenant, text)
  redis.call('HSET', row, kind .. '_pieces', number, kind .. '_tail', int(size))
  redis.call('HINCRBY', row, kind .. '_bytes', #text)
end)
for _ = 1, tonumber(next_one()) do
  local kind, file, ttl, name, pieces = next_one(), next_one(), next_one(), next_one(), {}
  for i = 1, tonumber(next_one()) do
    pieces[i] = next_one()
  end
  add_file(file, tenant, now, now + ttl, pieces, 'purpose', 'batch_output', 'name', name,
    'bytes', redis.call('HGET', row, kind .. '_bytes'))
  redis.call('HSET', row, kind .. '_file', file)
end
if not fields.ended then
  feed_at(tenant, id, now + delay)
  return 1
end
local KEEP_BATCH_MS = 30 * 24 * 3600 * 1000
redis.call('ZREM', K('feed', tenant), id)
redis.call('DEL', K('flight', id), K('labels', id))
redis.call('PEXPIRE', row, KEEP_BATCH_MS)
if redis.call('EXISTS', K('file', input)) == 1 then
  redis.call('HINCRBY', K('file', input), 'used', -1)
end
return 1
