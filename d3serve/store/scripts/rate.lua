-- RATE: count one request of a caller in this window. ARGV: API key, window_ms. Answers {how many, milliseconds left}.
write_when_full()
local key = K('rate', ARGV[1])
local count = redis.call('INCR', key)
if count == 1 then
  redis.call('PEXPIRE', key, ARGV[2])
end
return {count, redis.call('PTTL', key)}
