"""Attention and linear contracts and their implementations. `model/` calls; nothing of ours is imported here."""
