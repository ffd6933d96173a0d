"""`fcfs`: first come, first served. The given priority has no effect; a preempted request keeps its place in line.

The order of Orca (Yu et al., OSDI 2022) and the default of vLLM (Kwon et al., SOSP 2023).
"""

from scheduler.config import SchedulerConfig
from scheduler.policies.base import Policy


def fcfs(config: SchedulerConfig) -> Policy:
    """All defaults."""
    return Policy("fcfs", paper="Yu et al., Orca, OSDI 2022")
