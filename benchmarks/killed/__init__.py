"""Kill -9 at every point of writing: results must equal those of an unbroken run."""

from benchmarks.killed.training import kill_training as kill_training
