"""Context and generation roles, routing and KV transfer. Not written yet: the package marks its place in the import rules."""
