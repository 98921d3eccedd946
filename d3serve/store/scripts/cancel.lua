-- CANCEL: end a queued or running job at once. ARGV: id, tenant. Answers 1 if it did, 0 if it was done, -1 if unknown.
local id = ARGV[1]
write_when_full()
local j = read(id, 'status', 'tenant', 'group')
if j.tenant ~= ARGV[2] then
  return -1
elseif j.status == 'queued' then
  dequeue(id)
  place(j.group)
elseif j.status ~= 'running' then
  return 0
end
finish(id, 'canceled', now_ms())
return 1
