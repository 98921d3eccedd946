-- DELETE: erase a job that is not running; its tombstone stays. ARGV: id, tenant. Answers {1}, {-1} or {0, status}.
local id = ARGV[1]
local j = read(id, 'status', 'tenant', 'group', 'tomb_ms')
if j.tenant ~= ARGV[2] then
  return {-1}
elseif j.status == 'running' then
  return {0, j.status}
elseif j.status == 'queued' then
  dequeue(id)
  place(j.group)
end
redis.call('DEL', K('job', id), K('body', id), K('res', id))
redis.call('ZREM', K('jobs', j.tenant), id)
release_state(j.group, id, nil)
bury(id, j.tenant, now_ms(), j.tomb_ms)
tell(id, 'deleted')
return {1}
