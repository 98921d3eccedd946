-- BATCH_STEP: all that a feeder has achieved at a batch, in one step; nothing of it unless the fence still holds.
-- ARGV: id, fence, step (a name of its own), delay_ms (until it is looked at again), then of each
-- of these how many, and they:
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
local function rows_of(width)
  local rows = {}
  for i = 1, tonumber(next_one()) do
    rows[i] = {}
    for k = 1, width do
      rows[i][k] = next_one()
    end
  end
  return rows
end

write_when_full()
local tenant, held, status, input, last = unpack(redis.call('HMGET', row, 'tenant', 'fence', 'status', 'input', 'step'))
if last == step then
  return 1
elseif held ~= fence then
  return 0
end
local now, fields = now_ms(), {step = step}
for _, one in ipairs(rows_of(2)) do
  fields[one[1]] = one[2]
end
if status == 'cancelling' and not fields.ended then -- since the feeder looked, maybe
  fields.status = status
end
for field, value in pairs(fields) do
  redis.call('HSET', row, field, value)
end
for _, sum in ipairs(rows_of(2)) do
  redis.call('HINCRBY', row, sum[1], sum[2])
end
for _, fed in ipairs(rows_of(3)) do
  redis.call('HSET', K('flight', id), fed[1], fed[2])
  redis.call('HSET', K('labels', id), fed[1], fed[3])
end
for _, done in ipairs(rows_of(1)) do
  redis.call('HDEL', K('flight', id), done[1])
  redis.call('HDEL', K('labels', id), done[1])
end
for _, one in ipairs(rows_of(4)) do
  local kind, piece, number, text = unpack(one)
  local size = append_piece(piece, tenant, text)
  redis.call('HSET', row, kind .. '_pieces', number, kind .. '_tail', int(size))
  redis.call('HINCRBY', row, kind .. '_bytes', #text)
end
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
hold_batch(id, tenant, (redis.call('HGET', row, 'kept') or 0) + #(fields.errors or ''), now + KEEP_BATCH_MS)
if redis.call('EXISTS', K('file', input)) == 1 then
  redis.call('HINCRBY', K('file', input), 'used', -1)
end
return 1
