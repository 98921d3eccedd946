-- RENEW: keep a lease. ARGV: lease, lease_ms. Answers 1, or 0 when it has ended and commits will be refused.
if redis.call('EXISTS', K('lease', ARGV[1])) == 0 then
  return 0
end
write_when_full()
redis.call('ZADD', K('leases'), int(now_ms() + ARGV[2]), ARGV[1])
return 1
