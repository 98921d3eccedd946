-- PIECE_MOVE: put a reference in the place of a piece that it is a copy of. ARGV: piece, reference, batch, fence.
-- Answers 1, or 0 where somebody else writes the batch now or the piece has grown meanwhile.
local piece, reference, batch, fence = unpack(ARGV)
if redis.call('HGET', K('batch', batch), 'fence') ~= fence
  or piece_bytes(piece) ~= tonumber(string.match(reference, ' (%d+)$')) then
  return 0
end
redis.call('SET', K('piece', piece), reference, 'KEEPTTL')
return 1
