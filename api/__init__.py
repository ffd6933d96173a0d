"""The HTTP server: wire formats, routes, detokenising, configuration, metrics, and the launcher `python -m api.serve`."""
