-- HOOK_POSTPONE: make a claimed delivery due later, unless it has been settled. ARGV: id, tenant, milliseconds.
write_when_full()
if redis.call('ZSCORE', K('outbox', ARGV[2]), ARGV[1]) then
  due_at(ARGV[2], ARGV[1], int(now_ms() + ARGV[3]))
end
return 1
