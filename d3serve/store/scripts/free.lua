-- FREE: end a lease. ARGV: lease, 'lost'|'back'|'alone' (back, and never again beside a long turn), worker, warm_ttl_ms,
--       how many groups follow whose state stays in its cache, group ..., then what its jobs' times add to `tally`: field,
--       count ...
-- Answers {jobs back, jobs that ended, {lanes to wake}}; {-1, 0, {}} when it had ended before.
write_when_full()
local after = 6 + ARGV[5]
for i = 6, after - 1 do
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
if back >= 0 then -- once, however often it is sent
  for i = after, #ARGV, 2 do
    tally(ARGV[i], ARGV[i + 1])
  end
end
return {back, dead, wakes}
