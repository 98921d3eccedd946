-- PROGRESS: note how far jobs are, and that their turn waits for no other. ARGV: lease, stage,
-- share of the work that is done, seconds left ('' where nobody knows), id ...
-- Answers the ids that are still the lease's:
-- a job that was canceled, has expired or went to another worker is missing and needs no more work.
local mine = {}
write_when_full()
redis.call('HDEL', K('lease', ARGV[1]), 'waits')
for i = 5, #ARGV do
  local id = ARGV[i]
  local j = read(id, 'status', 'lease')
  if j.status == 'running' and j.lease == ARGV[1] then
    redis.call('HSET', K('job', id), 'stage', ARGV[2])
    if ARGV[3] ~= '' then
      redis.call('HSET', K('job', id), 'fraction', ARGV[3], 'eta_s', ARGV[4])
    end
    tell(id, 'running')
    mine[#mine + 1] = id
  end
end
return mine
