-- Files in pieces: only for scripts that write them. Comes after lib.lua.

-- How much of a file a piece holds: '@<file> <bytes>', or '=' and the text.
local function piece_bytes(piece)
  local key = K('piece', piece)
  if redis.call('GETRANGE', key, 0, 0) == '@' then
    return tonumber(string.match(redis.call('GET', key), ' (%d+)$') or 0)
  end
  return math.max(0, redis.call('STRLEN', key) - 1)
end

local function keep_piece(piece, tenant, till)
  if redis.call('EXISTS', K('piece', piece)) == 1 then
    redis.call('PEXPIREAT', K('piece', piece), int(till))
    hold(piece, tenant, piece_bytes(piece), till)
  end
end

local function drop_piece(piece, tenant)
  let_go(piece, tenant, piece_bytes(piece))
  redis.call('DEL', K('piece', piece))
end

-- Adds text to the end of a piece that Redis holds, or begins it; answers how long it is.
local function append_piece(piece, tenant, text)
  local key, before = K('piece', piece), piece_bytes(piece)
  if redis.call('EXISTS', key) == 1 then
    let_go(piece, tenant, before)
    redis.call('APPEND', key, text)
  else
    redis.call('SET', key, '=' .. text)
  end
  hold(piece, tenant, before + #text, FOREVER)
  return before + #text
end

-- The row of a file, whose pieces are there: from here on it exists, until `till`.
local function add_file(id, tenant, now, till, pieces, ...)
  redis.call('HSET', K('file', id), 'tenant', tenant, 'created', int(now), 'expires', int(till), 'pieces', #pieces, ...)
  redis.call('PEXPIREAT', K('file', id), int(till))
  redis.call('ZADD', K('files', tenant), string.format('%.3f', now_fine()), id)
  for _, piece in ipairs(pieces) do
    keep_piece(piece, tenant, till)
  end
end

-- The row of a batch is a part of what its tenant keeps, in place of what it was before.
local function hold_batch(id, tenant, bytes, till)
  let_go(id, tenant, redis.call('HGET', K('batch', id), 'kept') or 0)
  redis.call('HSET', K('batch', id), 'kept', int(bytes))
  hold(id, tenant, bytes, till)
end

-- A batch is looked at next at `due`, and its tenant no later.
local function feed_at(tenant, batch, due)
  redis.call('ZADD', K('feed', tenant), int(due), batch)
  redis.call('ZADD', K('feeds'), 'LT', int(due), tenant)
end
