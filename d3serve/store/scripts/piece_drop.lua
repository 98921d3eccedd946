-- PIECE_DROP: remove pieces of a file that will not be. ARGV: tenant, piece ...
write_when_full()
for i = 2, #ARGV do
  drop_piece(ARGV[i], ARGV[1])
end
return #ARGV - 1
