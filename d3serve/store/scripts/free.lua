-- FREE: end a lease. ARGV: lease, 'lost'|'back'|'alone' (back, and never again beside a long turn), worker, warm_ttl_ms, group ... whose state stays in its cache.
-- Answers {jobs back, jobs that ended, {lanes to wake}}; {-1, 0, {}} when it had ended before.
write_when_full()
for i = 5, #ARGV do
  redis.call('SET', K('warm', ARGV[i]), ARGV[3], 'PX', ARGV[4])
end
if ARGV[2] == 'alone' then
  for _, id in ipairs(redis.call('SMEMBERS', K('leasejobs', ARGV[1]))) do
    if redis.call('HGET', K('job', id), 'lease') == ARGV[1] then
      redis.call('HSET', K('job', id), 'beside', 'no')
    end
  end
end
local back, dead, wakes = free_lease(ARGV[1], ARGV[2] == 'lost', now_ms())
return {back, dead, wakes}
