"""Measurements of any OpenAI-compatible server, side by side: `bench.serve` and `bench.priority`. See bench/README.md."""
