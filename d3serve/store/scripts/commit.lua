-- COMMIT: end a running job; only for the lease that holds it, but for a refusal, which no other attempt would find
-- otherwise. A final status is never overwritten.
-- ARGV: lease, id, 'succeeded'|'failed', result or error (JSON), usage (JSON or ''), questions done,
--       milliseconds of its passes ('' none), identity of the weights ('' unknown), '1' where it is a refusal,
--       bytes up to which a tenant may keep what it has an answer to.
-- Answers the milliseconds from its submission to this end, at least 1, also when this lease has committed before and the
-- answer was lost; else 0.
local lease, id, status, text, usage, done, pass_ms, identity, refusal, room = unpack(ARGV)
local j = read(id, 'status', 'lease', 'ttl_ms', 'group', 'tenant', 'created', 'finished')
local function took(finished)
  return math.max(1, finished - j.created)
end
local open, mine = j.status == 'queued' or j.status == 'running', j.lease == lease
if not mine and not (open and refusal == '1') then
  return 0
elseif not open then
  return (j.status == status) and took(j.finished) or 0
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
local told = {'stage', 'finished', 'questions_done', done, 'identity', identity}
for name, value in pairs({usage = usage, pass_ms = pass_ms}) do
  if value ~= '' then
    told[#told + 1], told[#told + 2] = name, value
  end
end
redis.call('HSET', K('job', id), unpack(told))
local now = now_ms()
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
return took(now)
