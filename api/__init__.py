"""The HTTP server: wire formats, routes, streaming, security, metrics and the launcher `python -m api.serve`."""
