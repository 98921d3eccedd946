-- SERVE: a worker has a model. ARGV: worker, ttl_ms, model, field, value ... Writes the fields and answers {}; or answers
-- {worker, model} of a live one that serves another, and writes nothing: any worker may claim any job of a queue.
for _, other in ipairs(redis.call('ZRANGEBYSCORE', K('workers'), int(now_ms()), '+inf')) do
  local said = redis.call('HMGET', K('worker', other), 'serves', 'load')
  if other ~= ARGV[1] and said[1] and said[1] ~= ARGV[3] and said[2] ~= 'failed' then
    return {other, said[1]}
  end
end
write_when_full()
say(ARGV[1], ARGV[2], 'serves', unpack(ARGV, 3))
return {}
