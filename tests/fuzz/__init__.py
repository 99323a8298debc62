"""Hostile inputs for everything that reads: structure-aware, seeded, in sacrificial processes."""
