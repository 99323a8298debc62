"""Kill -9 at every point of writing: results must equal those of an unbroken run."""
