"""Runs `scheduler.Scheduler` itself in virtual time: see `scheduler/simulation/records.py` for what goes in and out."""
