-- PIECE_PUT: store a piece of a file that is still to be. ARGV: piece, tenant, value ('=text' or '@...'), ttl_ms,
-- max_bytes (that the tenant may keep with it). Answers {'new'} or {'quota', used}.
local piece, tenant, value, ttl, most = unpack(ARGV)
local size = tonumber(string.sub(value, 1, 1) == '@' and string.match(value, ' (%d+)$') or #value - 1)
local kept = tonumber(redis.call('HGET', K('kept'), tenant) or 0)
if kept + size > tonumber(most) then
  return {'quota', kept}
end
redis.call('SET', K('piece', piece), value)
keep_piece(piece, tenant, now_ms() + ttl)
return {'new'}
