"""Context and generation roles, routing and KV transfer: not written yet, named here for the import rules."""
