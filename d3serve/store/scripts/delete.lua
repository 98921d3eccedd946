-- DELETE: erase a job that is not running, and what its webhook deliveries hold; its tombstone stays.
-- Of a job that has expired the deliveries are left to erase. ARGV: id, tenant. Answers {1}, {-1} or {0, status}.
local id = ARGV[1]
write_when_full()
local j = read(id, 'status', 'tenant', 'group', 'tomb_ms', 'kept', 'idem')
if j.tenant ~= ARGV[2] then
  local owner = string.match(redis.call('GET', K('gone', id)) or '', '^%S+ (.*)$')
  if not j.tenant and owner == ARGV[2] then
    erase_events(id)
  end
  return {-1}
elseif j.status == 'running' then
  return {0, j.status}
elseif j.status == 'queued' then
  dequeue(id)
  place(j.group)
end
redis.call('DEL', K('job', id), K('body', id), K('res', id))
redis.call('ZREM', K('jobs', j.tenant), id)
release_state(j.group, id, j.tenant, nil)
let_go(id, j.tenant, j.kept or 0)
if (j.idem or '') ~= '' and string.match(redis.call('GET', K('idem', j.idem)) or '', '^%S+') == id then
  redis.call('DEL', K('idem', j.idem))
end
redis.call('SET', K('erased'), int(now_ms()), 'NX')
erase_events(id)
bury(id, j.tenant, now_ms(), j.tomb_ms)
tell(id, 'deleted')
return {1}
