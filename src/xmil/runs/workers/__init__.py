"""Who computes: this process, worker processes, or a Ray cluster."""
