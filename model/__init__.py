"""The decoder, its weights, meshes and KV arrays, the jitted step, and the engine loop around them."""
