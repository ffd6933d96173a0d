"""Measurements of OpenAI-compatible servers, side by side: `bench.serve`, `bench.priority`. See bench/README.md."""
