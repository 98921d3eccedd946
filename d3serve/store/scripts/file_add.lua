-- FILE_ADD: a file exists from now on, of pieces that are there. ARGV: id, tenant, ttl_ms, how many pieces, piece ...,
-- then field, value ... Answers when it was made and until when it is kept; {0} where a piece has gone.
local id, tenant, ttl, count = unpack(ARGV, 1, 4)
local pieces, now = {}, now_ms()
for i = 5, 4 + count do
  pieces[#pieces + 1] = ARGV[i]
  if redis.call('EXISTS', K('piece', ARGV[i])) == 0 then
    return {0}
  end
end
add_file(id, tenant, now, now + ttl, pieces, unpack(ARGV, 5 + count))
return {now, now + ttl}
