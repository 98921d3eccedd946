-- PIECE_DROP: remove what there is of a file that nobody was told of: its pieces, and its row, where FILE_ADD was done
-- and its answer was lost. ARGV: file, tenant, piece ...
local file, tenant = unpack(ARGV, 1, 2)
write_when_full()
redis.call('DEL', K('file', file))
redis.call('ZREM', K('files', tenant), file)
for i = 3, #ARGV do
  drop_piece(ARGV[i], tenant)
end
return #ARGV - 2
