"""KV cache: buffers and strategies below, the pool over them, the prefix index over the pool, the requests' view on
top."""
