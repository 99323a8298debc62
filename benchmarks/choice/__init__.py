"""Which method a model should be explained with, and whether a map can be believed: nets and figures."""
