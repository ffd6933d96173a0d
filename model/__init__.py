"""The decoder, its weights, meshes and KV arrays, the jitted step, and the engine loop that drives them with a scheduler."""
