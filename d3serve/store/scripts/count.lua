-- COUNT: add one to what a worker counts. ARGV: worker, ttl_ms, field. Answers the new value.
write_when_full()
local told = redis.call('HGET', K('worker', ARGV[1]), ARGV[3]) or 0
say(ARGV[1], ARGV[2], ARGV[3], int(told + 1))
return told + 1
