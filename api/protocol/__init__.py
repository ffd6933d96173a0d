"""The wire formats: request models, the error envelope, strict JSON. A leaf: imports nothing of ours."""
