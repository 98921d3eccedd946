-- FILE_DROP: erase a file. ARGV: id, tenant, piece ... Answers 1, 0 where there is none, -1 while a batch reads it.
local id, tenant = unpack(ARGV, 1, 2)
write_when_full()
local owner, used = unpack(redis.call('HMGET', K('file', id), 'tenant', 'used'))
if owner ~= tenant then
  return 0
elseif tonumber(used or 0) > 0 then
  return -1
end
redis.call('DEL', K('file', id))
redis.call('ZREM', K('files', tenant), id)
for i = 3, #ARGV do
  drop_piece(ARGV[i], tenant)
end
redis.call('SET', K('erased'), int(now_ms()), 'NX')
return 1
