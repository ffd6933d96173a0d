"""The routes, one file for each group; `api/app.py` registers them."""
