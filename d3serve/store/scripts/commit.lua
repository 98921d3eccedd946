-- COMMIT: end a running job; only for the lease that holds it, but for a refusal, which no other attempt would find
-- otherwise. A final status is never overwritten.
-- ARGV: lease, id, 'succeeded'|'failed', result or error (JSON), usage (JSON or ''), questions done,
--       milliseconds of its passes ('' none), identity of the weights ('' unknown), '1' where it is a refusal,
--       bytes up to which a tenant may keep what it has an answer to, milliseconds that tokenizing took ('' unknown).
-- Answers 1, also when this lease has committed before and the answer was lost; else 0.
local lease, id, status, text, usage, done, pass_ms, identity, refusal, room, tokenize_ms = unpack(ARGV)
local j = read(id, 'status', 'lease', 'ttl_ms', 'group', 'tenant', 'lane', 'created', 'started')
local open, mine = j.status == 'queued' or j.status == 'running', j.lease == lease
if not mine and not (open and refusal == '1') then
  return 0
elseif not open then
  return (j.status == status) and 1 or 0
end
write_when_full()
if not mine then
  if j.status == 'queued' then
    dequeue(id)
    place(j.group)
  else
    redis.call('SREM', K('leasejobs', j.lease), id)
  end
  redis.call('HSET', K('job', id), 'lease', lease)
end
redis.call('HSET', K('job', id), 'stage', 'finished', 'questions_done', done, 'identity', identity)
if usage ~= '' then
  redis.call('HSET', K('job', id), 'usage', usage)
end
if pass_ms ~= '' then
  redis.call('HSET', K('job', id), 'pass_ms', pass_ms)
end
local now = now_ms()
local spent_ms = {
  queue = j.started and j.started - j.created, tokenize = tonumber(tokenize_ms or ''), pass = tonumber(pass_ms),
  total = now - j.created,
}
for what, ms in pairs(spent_ms) do
  observe(what, j.lane, ms)
end
if status == 'succeeded' then
  redis.call('SET', K('res', id), text, 'PX', j.ttl_ms)
  local spent = cjson.decode(usage)
  redis.call('HINCRBY', K('work'), 'tokens_asked', spent.input_tokens)
  redis.call('HINCRBY', K('work'), 'tokens_read', spent.computed_tokens)
  if spent.state_tokens > 0 then
    redis.call('HINCRBY', K('work'), spent.state_cached and 'states_cached' or 'states_read', 1)
  end
  finish(id, status, now, nil, tonumber(redis.call('HGET', K('kept'), j.tenant) or 0) <= tonumber(room))
else
  finish(id, status, now, text)
end
return 1
