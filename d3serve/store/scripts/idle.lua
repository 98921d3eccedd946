-- IDLE: a worker waits for work of these lanes by itself for so long, or no longer (0). ARGV: worker, ms, lane ...
-- Answers the lanes for which it was called before it heard of it: somebody else should then be told.
local worker, ms = ARGV[1], tonumber(ARGV[2])
write_when_full()
for i = 3, #ARGV do
  if ms > 0 then
    redis.call('ZADD', K('idle', ARGV[i]), int(now_ms() + ms), worker)
    redis.call('PEXPIRE', K('idle', ARGV[i]), WAKE_MS)
  else
    redis.call('ZREM', K('idle', ARGV[i]), worker)
  end
end
local called = ms == 0 and redis.call('LRANGE', K('call', worker), 0, -1) or {}
if ms == 0 then
  redis.call('DEL', K('call', worker))
end
return called
